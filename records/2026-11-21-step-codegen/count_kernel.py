"""Instructions per logit of the two loops of plumbing/triton_cross_entropy.py, compiled for sm_90.

python count_kernel.py FOLDER_OF_SASS_PY [POINTER], in the project's root; POINTER is the gradient's, *bf16 or *fp8e5.
"""

import re
import sys
from collections import Counter

sys.path[:0] = [sys.argv[1], "."]

import sass
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plumbing.triton_cross_entropy import PER_THREAD, WARPS, cross_entropy_kernel

pointers = dict(logits="*bf16", targets="*i64", losses="*fp32", gradient=sys.argv[2] if len(sys.argv) > 2 else "*bf16")
constants = dict(V=50304, IGNORE_INDEX=-100, THREADS=32 * WARPS, PER_THREAD=PER_THREAD)
signature = pointers | dict(log2_scale="fp32") | dict.fromkeys(constants, "constexpr")
places = {name: (place,) for place, name in enumerate(signature)}
source = ASTSource(
    cross_entropy_kernel,
    signature,
    constexprs={places[name]: value for name, value in constants.items()},
    attrs={places[name]: [["tt.divisibility", 16]] for name in pointers},
)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": WARPS})
instructions, loops = sass.inner_loops(sass.disassemble(kernel.asm["cubin"]))
print(f"cross_entropy_kernel: {len(instructions)} instructions")
for first, last in loops:
    names = [re.sub(r"^@\S+ ", "", text).split()[0].split(".")[0] for text in instructions[first : last + 1]]
    print(f"  {len(names) / PER_THREAD:.1f} per element: {Counter(names).most_common(12)}")
