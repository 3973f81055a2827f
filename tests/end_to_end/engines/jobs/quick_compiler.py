"""Named by ``custom_imports``: ``torch.compile`` captures and differentiates its graphs and runs them as they are.

Generating and compiling C++ takes 20 to 50 s of a core a layer; ``make matrix`` does that.
"""

import torch

torch.compiler.set_default_backend("aot_eager")
