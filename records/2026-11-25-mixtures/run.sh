#!/bin/bash
# Data, fifteen runs, two at a time, and what is kept of them: bash records/2026-11-25-mixtures/run.sh, in the clone.
set -e
export OMP_NUM_THREADS=1
here=records/2026-11-25-mixtures
library=$(python -c "import sysconfig; print(sysconfig.get_paths()['stdlib'])")
python fineweb.py --dataset python-docs --tokenizer bytes
python fineweb.py --input "$library/*.py" --tokenizer bytes --out-dir code --max-tokens 2549854

for seed in 1 2 3; do
  for share in 0 25 50 75 100; do
    echo --preset quickstart --data python_docs code --data-weights $((100 - share)) $share --seed $seed --max-steps 120 \
      --val-every 60 --sample-every 0 --checkpoint-every 0 --keep-best false --no-compile --out-dir log/code$share-$seed
  done
done > log/mixtures.txt
python $here/runs.py 0 < log/mixtures.txt & python $here/runs.py 1 < log/mixtures.txt & wait

for run in log/code*-[123]; do
  mkdir -p $here/$(basename $run)
  grep -E " (val|val_bpb)(/[a-z_]+)? " $run/log.txt > $here/$(basename $run)/log.txt
  cp $run/run.txt $here/$(basename $run)/
done
python $here/plot.py
