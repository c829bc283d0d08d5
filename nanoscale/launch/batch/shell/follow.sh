launcher=$!
if [ "$heard" ]; then
    sleep 1 # the launcher cannot receive signals before it has started
    kill -s "$heard" "$launcher"
fi
while :; do
    interrupted=
    code=0
    wait "$launcher" || code=$?
    [ "$interrupted" ] || break
done
# A launcher that has not installed its handlers yet is killed by the signal. If bash itself receives
# the signal at that moment, it has no exit code of its child.
case "$heard$code" in
USR1138 | TERM143 | USR1-1 | TERM-1) code=75 ;;
esac
