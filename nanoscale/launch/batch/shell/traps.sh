heard=
launcher=
pass_on() {
    heard=${heard:-$1}
    interrupted=yes
    [ -z "$launcher" ] || kill -s "$1" "$launcher"
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
