# init.py would write FSDP: differs because it is the recipe bagel_7b_fsdp under another engine.
"""``bagel_7b_fsdp`` under DeepSpeed's ZeRO-3: the same training to the last digit that the precision shows.

deepspeed --num_gpus 8 tools/train.py bagel_7b_zero3 --cfg-options train_dataloader.dataset.data_path=my.jsonl
"""

_base_ = "bagel_7b_fsdp.py"
backend = dict(_delete_=True, type="deepspeed", config="zero3")
