"""A config in the style of xtuner and F-LMM: ZeRO-2 trains what joins a frozen language model and vision tower."""

from mmengine.hooks import CheckpointHook, IterTimerHook, LoggerHook
from mmengine.optim import CosineAnnealingLR, LinearLR
from torch.optim import AdamW

from unigen_ds.families.bagel.model import UnifiedModel

custom_imports = dict(imports=["unigen_ds.examples.digits"])  # DigitsDataset

#######################################################################
#                          PART 1  Settings                           #
#######################################################################
accumulative_counts = 2
batch_size = 4
dataloader_num_workers = 1
max_epochs = 1
optim_type = AdamW
lr = 1e-3
betas = (0.9, 0.999)
weight_decay = 0.01
max_norm = 1
warmup_ratio = 0.03
save_steps = 4
save_total_limit = 2
seq_length = 80

#######################################################################
#            PART 2  Model & Tokenizer & Image Processor              #
#######################################################################
tokenizer = dict(
    type="WordTokenizer",
    words=[
        *("draw", "a", "handwritten", "this", "is"),
        *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    ],
)
processor = dict(
    vit_transform=dict(type="ImageTransform", max_size=8, min_size=8, stride=4, mode="L"),
    vae_transform=dict(type="ImageTransform", max_size=8, min_size=8, stride=2, mode="L"),
)
model = dict(
    type=UnifiedModel,
    llm=dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    vit=dict(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        num_channels=1,
    ),
    vae=dict(type="PixelAutoencoder", channels=1),
    max_latent_size=4,
    freeze=["vae", "vit", "llm"],
)

#######################################################################
#                      PART 3  Dataset & Dataloader                   #
#######################################################################
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=dataloader_num_workers,
    seq_length=seq_length,
    packing=dict(type="BestFitPacking", window=512),
    dataset=dict(type="DigitsDataset", root="work_dirs/data/digits", split="train"),
)

#######################################################################
#                    PART 4  Scheduler & Optimizer                    #
#######################################################################
optim_wrapper = dict(
    optimizer=dict(type=optim_type, lr=lr, betas=betas, weight_decay=weight_decay),
    clip_grad=dict(max_norm=max_norm),
    accumulative_counts=accumulative_counts,
    precision="fp32",
)
param_scheduler = [
    dict(
        type=LinearLR,
        start_factor=1e-5,
        by_epoch=True,
        begin=0,
        end=warmup_ratio * max_epochs,
        convert_to_iter_based=True,
    ),
    dict(
        type=CosineAnnealingLR,
        eta_min=0.0,
        by_epoch=True,
        begin=warmup_ratio * max_epochs,
        end=max_epochs,
        convert_to_iter_based=True,
    ),
]
train_cfg = dict(max_epochs=max_epochs)
backend = dict(type="deepspeed", config="zero2")

#######################################################################
#                           PART 5  Runtime                           #
#######################################################################
custom_hooks = []
default_hooks = dict(
    timer=dict(type=IterTimerHook),
    logger=dict(type=LoggerHook, log_metric_by_epoch=False, interval=1),
    checkpoint=dict(type=CheckpointHook, by_epoch=False, interval=save_steps, max_keep_ckpts=save_total_limit),
)
visualizer = None
randomness = dict(seed=0)
load_from = None
resume = False
launcher = "pytorch"
