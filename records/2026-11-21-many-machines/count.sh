# the counts of this record, one after the other: PYTHON=python sh count.sh
cd "$(dirname "$0")" || exit 1
export OMP_NUM_THREADS=1
for options in "--ranks 2" "--ranks 4" "--ranks 4 --optimizer muon" "--ranks 2 --bf16" \
    "--ranks 2 --shape gpt2" "--ranks 4 --shape gpt2" "--ranks 4 --shape gpt2 --optimizer muon" "--ranks 2 --shape gpt2 --bf16"; do
    nice -n 10 "${PYTHON:-python}" count.py $options
    echo
done
