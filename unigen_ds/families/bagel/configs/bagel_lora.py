# init.py would write epochs, validation and previews: differs because it is BAGEL's command with adapters.
"""LoRA on BAGEL-7B-MoT: the experts that draw and those that read get adapters of rank 16, everything else is frozen.

81 M parameters are trained: a checkpoint is 1.3 GB with moments and average, the exported adapters 162 MB in bf16. The
frozen base is 29 GB in bf16: one device of 80 GB, or 8 of 24 GB, which share it. ``tools/export.py CKPT OUT --merge``
writes a directory as BAGEL's.

    torchrun --nproc-per-node 8 tools/train.py bagel_lora --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

_base_ = "bagel_7b_fsdp.py"

lora = dict(
    r=16,
    alpha=32,
    dropout=0.05,
    target_modules=[
        r"language_model\..*self_attn\.[qkvo]_proj(_moe_gen)?$",
        r"language_model\..*mlp(_moe_gen)?\.(gate|up|down)_proj$",
    ],
)
optim_wrapper = dict(optimizer=dict(lr=1e-4))
param_scheduler = [dict(type="LinearLR", start_factor=0.01, unit="update", begin=0, end=100)]
train_cfg = dict(max_updates=3000)
backend = dict(_delete_=True, type="fsdp", sharding_strategy="FULL_SHARD")
