# How often a thread of fineweb.py holds the interpreter's lock: bash gil.sh CHECKOUT NAME 'FILES.parquet'
# Half of the files are read (--part 1/2), as a part other than the first has no validation sample, like FineWeb-Edu.
export OMP_NUM_THREADS=1
for mode in --threads --gil; do
  rm -rf out
  py-spy record -r 100 -f raw -o raw-$2$mode.txt $mode -- python -c "
import sys, resource; sys.path.insert(0, '$1'); import fineweb
if __name__ == '__main__':
    fineweb.prepare(fineweb.Options(input=('$3',), out_dir='out', num_proc=2, part='1/2'))
    u = resource.getrusage(resource.RUSAGE_SELF); print('CPU seconds', u.ru_utime + u.ru_stime)
" 2>/dev/null | grep -v py-spy
  echo "$2 $mode: all samples, and those after the start (imports, tables)"
  awk '{n += $NF; if ($0 !~ /import|gpt2_encoding|copy_encoding|remake|get_encoding|Encoding.__init__/) m += $NF} END {print n, m}' raw-$2$mode.txt
done
