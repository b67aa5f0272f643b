#!/bin/sh
# run.sh DATA: the counts of graphs and of bytes, on shards in the folder DATA
export OMP_NUM_THREADS=1 PYTHONPATH=.
here=$(dirname "$0")
common="--data $1 --device cpu --warmup-steps 1 --max-steps 3 --val-every 0 --hellaswag-every 0 --sample-every 0 --checkpoint-every 0"
small="--n-head 2 --n-embd 64 --block-size 64 --sequence-length 64 --batch-size 2 --total-batch-size 512 --compile"
for layers in 3 12; do
    for more in "" "--activation-checkpointing"; do
        echo "== --shard on 2 ranks, $layers layers $more"
        out=$(mktemp -d)
        torchrun --standalone --nproc-per-node=2 "$here/counts.py" graphs $common $small --dtype bfloat16 --n-layer $layers --shard $more \
            --out-dir "$out/run" 2>&1 | grep "^graphs"
    done
done
large="--n-layer 3 --n-head 12 --n-embd 1536 --block-size 64 --sequence-length 64 --batch-size 1 --total-batch-size 512 --no-compile --dtype float32"
for ranks in 1 2 4; do
    echo "== --shard on $ranks ranks"
    out=$(mktemp -d)
    torchrun --standalone --nproc-per-node=$ranks "$here/counts.py" bytes $common $large --shard --out-dir "$out/run" 2>&1 | grep "^rank 0"
done
