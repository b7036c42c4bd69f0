"""An update of somebody's own training, attacked and scored in this process.

The public functions stand in `fedleak` itself: `fedleak.attack`, `fedleak.score`. The example of a
gradient goes from a plain transformers model to the text that it was computed on:

>>> import fedleak, torch
>>> from transformers import AutoModelForSequenceClassification, AutoTokenizer
>>> folder = fedleak.builtin_model("bert-tiny")  # yours: a hub id, or a folder
>>> model = AutoModelForSequenceClassification.from_pretrained(folder)
>>> tokenizer = AutoTokenizer.from_pretrained(folder)
>>> texts = ["the patient has a fever", "my sister lost her job"]
>>> batch = tokenizer(texts, padding=True, return_tensors="pt")
>>> model(**batch, labels=torch.tensor([1, 0])).loss.backward()
>>> result = fedleak.attack(model, model, tokenizer, sent=fedleak.SentUpdate(num_examples=2))
>>> sorted(result.texts)
['my sister lost her job', 'the patient has a fever']
>>> result.verified
True

`score` compares the answer with the texts, and says what chance reads:

>>> scored = fedleak.score(result, texts)
>>> scored.row.exact_match, scored.row.guess_rougeL < 50
(1.0, True)

A mistake in a call raises `fedleak.ConfigError`, with one line that says what to do:

>>> fedleak.attack({"bert.pooler.dense.wieght": torch.ones(2)}, model, tokenizer, sent=result.sent)
Traceback (most recent call last):
...
fedleak.util.errors.ConfigError: the model has no parameter 'bert.pooler.dense.wieght': ...
"""
