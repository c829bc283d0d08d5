import sys
from collections import Counter
from nanoscale.config.derive import derive
from tests.support.measured_memory import ROWS, config_of
from tests.support.ranks import run_ranks
from tests.rehearse.real_ranks import *
def main():
    pats=sys.argv[1:]
    rows=[r for r in ROWS if any(p in r.name for p in pats)]
    for r in rows:
        if r.backend!="native": continue
        c=config_of(r); W=derive(c).world_size
        try:
            real=run_ranks(measured,W,[c])
            (fake,)=run_ranks(played,1,[c],list(range(W)))
        except Exception as e:
            print(r.name,"FAILED",str(e)[-1500:]); continue
        for rank in range(W):
            m=real[rank][0]; f=fake[0][rank]
            if f.error: print(r.name,rank,f.error[-900:]); break
            s=sequence_of(f)
            same = s==m.sequence
            print(f"{r.name:36} {rank} real {m.peak/2**20:8.2f} fake {f.peak/2**20:8.2f} {f.peak/m.peak-1:+.2%} {f.peak_phase} seq {'same' if same else 'DIFF'} {len(s)} {len(m.sequence)} {f.seconds:.1f}s",flush=True)
            if not same:
                for i,(a,b) in enumerate(zip(s,m.sequence)):
                    if a!=b: print("   at",i,"fake",a,"real",b); break
main() if __name__=="__main__" else None
