"""Words that a command line or a config may choose from. Nothing is imported here, so ``--help`` needs no torch."""

AUTO = "auto"
"""``resume='auto'``, what a bare ``--resume`` means: the newest valid checkpoint, else what the config begins with."""
BACKEND_WORDS = "single, deepspeed[:zero1|zero2|zero3|...|FILE.json], fsdp[:FULL_SHARD|...]"
LAUNCHERS = ("none", "pytorch", "slurm", "mpi")
BATCH_CHOICES = ("refuse", "keep-batch", "keep-lr", "linear", "sqrt")
"""``on_batch_change``: how the learning rate changes when a resume has another effective batch, or that it has not."""
DATA_CHOICES = ("refuse", "append", "restart")
"""``on_data_change``: what a resume does with changed data."""
SHIPPED_NAMES = (
    "bagel_7b_fsdp, bagel_7b_zero3, bagel_from_parts, bagel_lora, decoder_lm_300m, decoder_lm_90m,"
    " frozen_vlm_zero2, llava_zero2, nanovlm_230m, nanovlm_460m, qwen_sft, unified_digits or unified_emoji"
)
"""Names of the configs of the package (``shipped_configs``)."""
TASKS = ("chat", "caption", "draw", "edit", "pretrain")
"""What a record may teach: ``tools/init.py --task``."""
DTYPE_NAMES = ("fp32", "bf16", "fp16")
"""Types of floating-point tensors in files and in a model that draws or reads."""
GUIDES = {
    "unified_fsdp": "exported variables of BAGEL's FSDP trainer (train_unified_fsdp.sh)",
    "unified_generation": "flags of train_unified_generation.py",
    "decoder_fsdp": "train_fsdp.py CONFIG.yaml, the FSDP trainer of decoder LMs",
    "xtuner": "a config of xtuner, F-LMM or mmengine in Python",
    "nanovlm": "flags of nanoVLM's train.py, or a YAML file of its two configs",
}
"""Trainers whose settings ``tools/migrate.py`` translates."""
