#!/bin/bash
# Five kinds of run with the code in $1, each in a folder of its own below $2. Shards: $3 (python_docs, as the
# quickstart makes them) and $4 (with masks, as tests/conftest.py's make_shards makes them).
export OMP_NUM_THREADS=1 PYTHONPATH=$1
train=$1/train_gpt2.py; out=$2
common="--preset quickstart --device cpu --dtype float32 --max-steps 100 --val-every 50 --sample-every 0"
small="$common --n-layer 2 --n-head 2 --n-embd 64 --block-size 64 --sequence-length 64 --val-tokens 4096 --data $3"
python $train $common --data $3 --out-dir $out/quickstart
python $train $small --optimizer adamw --schedule cosine --out-dir $out/adamw
torchrun --standalone --nproc_per_node=2 $train $small --out-dir $out/muon2
python $train $small --total-batch-size 65536 --batch-ramp 1000000 --batch-size 64 --max-steps 30 --out-dir $out/ramp
python $train $small --data $4 --total-batch-size 1024 --out-dir $out/masked
