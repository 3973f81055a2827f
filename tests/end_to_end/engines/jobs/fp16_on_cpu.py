"""Named by ``custom_imports``: lets DeepSpeed compute in fp16 on a CPU, which torch does, slowly.

DeepSpeed refuses it unless the CPU has fp16 instructions (``torch.ops.mkldnn._is_mkldnn_fp16_supported``). That answer
alone is replaced; its fp16 optimizers, their flat masters, overflow check and loss scaler are the real ones.
"""

from deepspeed.accelerator import get_accelerator

get_accelerator().is_fp16_supported = lambda: True
