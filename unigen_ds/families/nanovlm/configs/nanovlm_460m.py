# init.py would write one learning rate: differs because here the connector is new, and learns faster.
"""nanoVLM's own trio, SigLIP2-base-512 and SmolLM2-360M, with its hyper-parameters, on its rows or any conversations.

On 8 GPUs an update is 128 sequences of 4,096 tokens. An image of up to 512 pixels is one tile, 64 tokens; a larger one
has up to 17, at 2,048 pixels. Records of more than 4 tiles are left out and counted, and a sequence has 18 at most. The
numbers are nanoVLM's, which counts images: its ``len(sample["images"])`` is that of a list with one tensor of all tiles
for each image. For large images raise both, or set ``processor.max_image_size=512``, with which each image is one tile;
``ImageCountFilter(max_images=4)`` instead of ``max_tiles`` counts as nanoVLM does. 2 % of the records are for
validation. From a published directory: ``model.pretrained=DIR``.

    torchrun --nproc-per-node 8 tools/train.py nanovlm_460m --cfg-options train_dataloader.dataset.data_path=my.parquet
"""

batch_size, accumulative_counts, seq_length, max_updates = 2, 8, 4096, 40_000
max_sample_tiles, max_sequence_tiles = 4, 18
_chat = (  # nanoVLM's: SmolLM2's own would begin each conversation with a system message
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

model = dict(type="VLM", llm=dict(), vit=dict(), pixel_shuffle_factor=4, activation_checkpointing=False)
tokenizer = dict(type="ChatTokenizer", path="HuggingFaceTB/SmolLM2-360M-Instruct", chat_template=_chat)
processor = dict(max_image_size=2048)
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=3,
    seq_length=seq_length,
    packing=dict(type="BestFitPacking", max_tiles=max_sequence_tiles),
    dataset=dict(
        type="UnifiedGenerationDataset",
        data_path="train.parquet",
        captions="understand",
        filters=[
            dict(
                type="RatingFilter",
                relevance_min_rating=1,
                image_correspondence_min_rating=1,
                visual_dependency_min_rating=1,
                formatting_min_rating=1,
            ),
            dict(type="ImageCountFilter", max_tiles=max_sample_tiles),
        ],
        index_workers=4,
    ),
)
val_dataloader = dict(split=0.02, num_workers=1)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=5e-5),
    accumulative_counts=accumulative_counts,
    clip_grad=dict(max_norm=1.0),
    paramwise_cfg=dict(
        groups=[
            dict(pattern="^connector", name="connector", lr=0.00512),
            dict(pattern="^vision_model", name="vision", lr=5e-5),
            dict(pattern="^language_model", name="language", lr=5e-5),
        ]
    ),
    precision="bf16",
)
param_scheduler = dict(type="WarmupCosineLR", warmup_ratio=0.03, min_ratio=0.1)
train_cfg = dict(max_updates=max_updates)
backend = dict(type="fsdp", sharding_strategy="NO_SHARD")
default_hooks = dict(
    logger=dict(type="LoggerHook", unit="update", interval=1, statistics_interval=100),
    checkpoint=dict(type="CheckpointHook", unit="update", interval=500, max_keep_ckpts=3),
)
custom_hooks = [
    dict(type="EvaluateHook", unit="update", interval=500, max_batches=64, save_best="val/loss", empty_cache=True),
]
randomness = dict(seed=0)
