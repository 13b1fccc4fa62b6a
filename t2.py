import sys
exec(open('t.py').read().split('for off in')[0])
from compile_muon.planning.simulate.lending import *
from compile_muon.planning.simulate.lending import _reads
import cProfile,pstats
import time
for off in ("cpu",{"device":"nvme","nvme_path":"/tmp"}):
    c=cfg(off)
    cap=tr.captured(Target(8,c,{"shard":8},"nccl"))
    num={}
    moves=[(p.half.value,mv) for p in cap.graphs for n in p.gm.graph.nodes for mv in p.moves.get(n,())]
    out=[]
    for h,(k,b) in moves:
        if k is Move.OPEN: out.append(f"{h[0]}{num.setdefault(b,len(num))}:{b.slots[0].name.split()[-1]}x{len(b.slots)}")
    print(len(out),len(list(_reads([m for _,m in moves]))),len(num)); print(" ".join(out[:60])) ; print(" ".join(out[-40:]))
    pr=cProfile.Profile(); pr.enable(); cap.simulated(m); pr.disable()
    pstats.Stats(pr).sort_stats("cumtime").print_stats(18)
