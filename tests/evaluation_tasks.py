"""Small tasks of lm-evaluation-harness with data of their own, and their scores computed by `transformers`."""

import json
import re
from math import exp, log

import torch
import transformers

from gpt_pretrain.data.tokenizer import load_tokenizer

CHOICES = [
    {"question": f"def f{n}(", "choices": ["value", "other value", "x + y", "return"][: 2 + n % 3], "answer": n % 2}
    for n in range(10)
]
# Longer and shorter than the context of 32 tokens, as texts before clozes are.
TEXTS = [{"text": text} for text in ("value + value " * 30, "return function", "def other(x):\n    return x + 1\n")]
CLOZES = [{"text": f"def function({'value, ' * n}", "next": word} for n in (0, 1, 2, 20) for word in ("value", "x")]
# The likeliest tokens of the tests' model.
CLOZES += [{"text": "value x", "next": "x"}, {"text": "value a", "next": "b"}]

_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
    train: {data}
test_split: test
fewshot_split: train
output_type: {kind}
metadata:
  version: 1.0
{rest}
"""
_CHOICE = """\
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_TEXT = """\
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
  - metric: word_perplexity
"""
_CLOZE = """\
doc_to_text: "{{text}}"
doc_to_target: "{{next}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
    aggregation: perplexity
  - metric: acc
"""
TASKS = ("lab_choice", "lab_text", "lab_cloze")


def write_tasks(folder):
    """The tasks' folder."""
    for name, kind, rest, documents in (
        ("lab_choice", "multiple_choice", _CHOICE, CHOICES),
        ("lab_text", "loglikelihood_rolling", _TEXT, TEXTS),
        ("lab_cloze", "loglikelihood", _CLOZE, CLOZES),
        ("lab_written", "generate_until", _CLOZE.partition("metric_list")[0], CLOZES),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        (folder / f"{name}.yaml").write_text(_TASK.format(name=name, kind=kind, data=data, rest=rest))
    return folder


class Reference:
    """Log-likelihoods by an exported model, token after token."""

    def __init__(self, hf, context):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).eval()
        self.tokenizer, self.context = load_tokenizer(hf / "tokenizer.json"), context

    @torch.no_grad()
    def token(self, before, token):
        """Of a token after others, and whether it is the likeliest."""
        logits = self.model(torch.tensor([before[-self.context :]])).logits[0, -1].double()
        return float(logits.log_softmax(-1)[token]), int(logits.argmax()) == token

    def continuation(self, text, more):
        """Both of a text after another, whose beginning is cut off where the model has no room for it."""
        # Space between them belongs to the second.
        before = self.tokenizer.encode(text.rstrip())
        tokens = self.tokenizer.encode(text + more)
        whole = tokens[-self.context - 1 :]
        first = len(whole) - (len(tokens) - len(before))
        scores = [self.token(whole[:place], whole[place]) for place in range(first, len(whole))]
        return sum(score for score, _ in scores), all(greedy for _, greedy in scores)

    def text(self, text):
        """Of a whole text, in windows of the context that share as little as they can."""
        tokens, total, done = [self.tokenizer.eod, *self.tokenizer.encode(text)], 0.0, 1
        while done < len(tokens):
            end = min(done + self.context, len(tokens))
            begin = 0 if done == 1 else max(0, end - self.context - 1)
            total += sum(self.token(tokens[begin:place], tokens[place])[0] for place in range(done, end))
            done = end
        return total

    def scores(self):
        """What the tasks measure."""
        right, normalized = [], []
        for each in CHOICES:
            found = [self.continuation(each["question"], choice)[0] for choice in each["choices"]]
            per_byte = [score / len(choice) for score, choice in zip(found, each["choices"], strict=True)]
            right.append(found.index(max(found)) == each["answer"])
            normalized.append(per_byte.index(max(per_byte)) == each["answer"])
        texts = [self.text(each["text"]) for each in TEXTS]
        clozes = [self.continuation(each["text"], each["next"]) for each in CLOZES]
        num_bytes = sum(len(each["text"].encode()) for each in TEXTS)
        num_words = sum(len(re.split(r"\s+", each["text"])) for each in TEXTS)
        return {
            "lab_choice/acc": sum(right) / len(right),
            "lab_choice/acc_norm": sum(normalized) / len(normalized),
            "lab_text/bits_per_byte": -sum(texts) / num_bytes / log(2),
            "lab_text/word_perplexity": exp(-sum(texts) / num_words),
            "lab_cloze/perplexity": exp(-sum(score for score, _ in clozes) / len(clozes)),
            "lab_cloze/acc": sum(greedy for _, greedy in clozes) / len(clozes),
        }
