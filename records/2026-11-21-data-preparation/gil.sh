# How often a thread of fineweb.py's own process holds the interpreter's lock: bash gil.sh CHECKOUT MAX_THREADS FILES
export OMP_NUM_THREADS=1
py-spy record -r 250 -f raw -o raw.txt --gil -- python "$(dirname "$0")/bound.py" "$@" 2>/dev/null | grep tokens
awk '{all += $NF
      if ($0 !~ /import|gpt2_encoding|copy_encoding|get_encoding|Encoding.__init__|mergeable|save_tokenizer/) n += $NF}
     END {print n " samples with the lock after the start, of " all}' raw.txt
