"""``nanovlm_460m`` with the smaller pair of nanoVLM: SigLIP-base-224 and SmolLM2-135M, 222 M parameters.

One image is one tile of 224 pixels, 49 tokens (a pixel shuffle of 2), so a sequence has more samples. It trains on
one device of 16 GB.

    python tools/train.py nanovlm_230m --cfg-options train_dataloader.dataset.data_path=my.parquet
"""

_base_ = "nanovlm_460m.py"

model = dict(
    llm=dict(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    ),
    vit=dict(image_size=224),
    pixel_shuffle_factor=2,
)
tokenizer = dict(path="HuggingFaceTB/SmolLM2-135M-Instruct")
processor = dict(max_image_size=224)
