"""lm-evaluation-harness over the API: multiple choice and perplexity by the log probabilities of
prompts, and generated text. The same tasks run in transformers on the same checkpoint, and
every number must agree.

Tried with lm_eval 0.4.13, transformers 5.23.0 and torch 2.13.0 (PyPI), the server in float32:
`python demo/clients/lm_eval_client.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HOME = tempfile.TemporaryDirectory(prefix="lm-eval-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = HOME.name
os.environ["TQDM_DISABLE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the server computes on the same machine

import lm_eval  # noqa: E402  it reads these when it is imported
import lm_eval.tasks  # noqa: E402

DEMO = Path(__file__).resolve().parent.parent
MODEL = DEMO.parent / "rorqual" / "bundled"
CHOICES = 4
CLOSE = 2e-3  # of log probabilities of a sentence, in nats: two programs' float32

COMMON = """\
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
num_fewshot: 0
"""
CHOICE = """\
task: next_sentence
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
PERPLEXITY = """\
task: perplexity
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}"
metric_list:
  - {metric: word_perplexity}
"""
WRITING = """\
task: writing
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["."], max_gen_toks: 24, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
"""


def write_tasks(folder: Path, count: int) -> None:
    """Each document: some sentences of a book, the next one, and the next ones of others."""
    paragraphs = [
        " ".join(text.split())
        for text in (DEMO / "heldout-sample.txt").read_text().split("\n\n")
        if 200 < len(text) < 900 and ". " in text
    ]
    step = len(paragraphs) // count
    pairs = [text.split(". ", 1) for text in paragraphs[::step][:count]]
    assert len(pairs) == count
    with (folder / "books.jsonl").open("w") as out:
        for i, (context, _) in enumerate(pairs):
            choices = [" " + pairs[(i + k) % count][1][:120] for k in range(CHOICES)]
            answer = i % CHOICES
            choices[0], choices[answer] = choices[answer], choices[0]
            found = {"context": context + ".", "choices": choices, "answer": answer}
            out.write(json.dumps({**found, "text": choices[answer]}) + "\n")
    common = COMMON.format(data=folder / "books.jsonl")
    for name, task in (("choice", CHOICE), ("perplexity", PERPLEXITY), ("writing", WRITING)):
        (folder / f"{name}.yaml").write_text(task + common)


def evaluate(model: str, arguments: dict[str, Any], tasks: list[str], folder: Path) -> Any:
    return lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
        log_samples=True,
    )


def answers(found: Any, task: str) -> list[Any]:
    """What the model answered to each request, in the order of the documents."""
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def numbers(value: Any) -> list[float]:
    """Log probabilities in the answers to a task; (log probability, greedy) becomes two."""
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in numbers(part)]
    return [float(value)]


def difference(ours: Any, theirs: Any, *tasks: str) -> float:
    """The largest of two log probabilities."""
    worst = 0.0
    for task in tasks:
        pairs = list(zip(numbers(answers(ours, task)), numbers(answers(theirs, task)), strict=True))
        assert pairs, f"{task} has no answers"
        worst = max(worst, *(abs(a - b) for a, b in pairs))
    assert worst < CLOSE, f"log probabilities differ by {worst}"
    return worst


def over_api(server: str, folder: Path) -> Any:
    """All tasks as completions, and what can be done so: as chats, and tokenized by the server."""
    place = {"base_url": server + "/v1/completions", "model": "rorqual-bundled"}
    place["num_concurrent"] = 8
    local = {**place, "tokenizer": str(MODEL), "tokenizer_backend": "huggingface"}
    tasks = ["next_sentence", "perplexity", "writing"]
    found = evaluate("local-completions", {**local, "add_bos_token": True}, tasks, folder)
    for task in tasks:
        print(f"{task}: {found['results'][task]}")

    # the tokenizer that the server has must do as well as the folder's; it adds no BOS.
    # Several prompts a request, too.
    remote = {**place, "tokenizer_backend": "remote"}
    several = {**local, "batch_size": 4}
    both = [evaluate("local-completions", one, tasks[:1], folder) for one in (remote, several)]
    difference(*both, tasks[0])

    chats = {**place, "base_url": server + "/v1/chat/completions", "num_concurrent": 1}
    chatted = evaluate("local-chat-completions", chats, ["writing"], folder)
    written = [text for (text,) in answers(chatted, "writing")]
    assert all(isinstance(text, str) for text in written)
    assert any(written), "no chat was answered"
    return found


def main(server: str, count: int = 8) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, count)
        began = time.perf_counter()
        ours = over_api(server, folder)
        seconds = time.perf_counter() - began
        checkpoint = {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu"}
        tasks = ["next_sentence", "perplexity", "writing"]
        theirs = evaluate("hf", {**checkpoint, "add_bos_token": True}, tasks, folder)
        worst = difference(ours, theirs, "next_sentence", "perplexity")
        assert answers(ours, "writing") == answers(theirs, "writing")
    print(
        f"measured: {count} documents of 3 tasks in {seconds:.1f} s; log probabilities differ from "
        f"transformers' by {worst:.1e} at most, greedy text not at all"
    )


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
