#!/bin/bash
# 20 steps as 1 process with B 16 and with B 4, and as 2 processes with B 4: bash layout.sh, in the root of the repository
export OMP_NUM_THREADS=1
for dtype in float32 bfloat16; do for optimizer in adamw muon; do for layout in 1-16 1-4 2-4; do
    out=log/layout/$dtype-$optimizer-$layout
    torchrun --standalone --nproc_per_node=${layout%-*} train_gpt2.py --preset quickstart --dtype $dtype --optimizer $optimizer \
        --batch-size ${layout#*-} --max-steps 20 --val-every 20 --sample-every 0 --checkpoint-every 0 --out-dir $out > /dev/null
    grep -E " (train|val) " $out/log.txt > "$(dirname "$0")/$dtype-$optimizer-$layout.txt"
done; done; done
