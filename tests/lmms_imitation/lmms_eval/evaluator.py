"""One call, as lmms-eval's: every task asks two questions about a picture, and its score is the answers' length."""

from types import SimpleNamespace

from PIL import Image

from lmms_eval.api.model import lmms
from lmms_eval.tasks import TaskManager


def simple_evaluate(model, model_args, tasks, batch_size, limit, log_samples, task_manager, cli_args, num_fewshot=None):
    assert isinstance(model, lmms) and isinstance(task_manager, TaskManager) and cli_args.process_with_media
    results = {}
    for task in tasks:
        docs = [{"image": Image.new("RGB", (64, 64), color)} for color in ("red", "blue")][:limit]
        model.task_dict[task] = {"test": docs}
        options = {"max_new_tokens": 4, "until": ["\n\n"]}
        arguments = [("<image>\n?", options, lambda doc: [doc["image"]], n, task, "test") for n in range(len(docs))]
        answers = model.generate_until([SimpleNamespace(args=each) for each in arguments])
        assert len(answers) == len(docs) and all(isinstance(answer, str) for answer in answers)
        results[task] = {"alias": task, "length,none": float(sum(map(len, answers))), "samples": len(answers)}
    return {"results": results, "configs": {}} if model.rank == 0 else None
