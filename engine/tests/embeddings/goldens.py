"""Vectors or scores of a model's folder, by Transformers and sentence-transformers on the CPU.

    goldens.py FOLDER REQUEST

REQUEST is JSON: {"texts": [text, ...]}, or {"ids": [[token, ...], ...], "token_types": [...]}. Prints a list with the
float32 numbers of each, in base64. Goldens were made with torch 2.15.0, transformers 5.23.0, sentence-transformers 6.2.0.
"""

import base64
import json
import os
import sys

import numpy
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification


def loaded(kind, folder):
    model, report = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32)
    unused = {"pooler.dense.weight", "pooler.dense.bias"}
    missing = set(report["missing_keys"]) - unused
    assert not missing and not report["unexpected_keys"], report
    return model.eval()


def modules(folder):
    with open(os.path.join(folder, "modules.json")) as file:
        listed = json.load(file)
    kinds = {"Pooling": Pooling, "Dense": Dense, "Normalize": Normalize}
    for module in listed[1:]:
        kind = kinds[module["type"].rsplit(".", 1)[1]]
        yield kind() if kind is Normalize else kind.load(os.path.join(folder, module["path"]))


def main(folder, request):
    request = json.loads(request)
    torch.set_num_threads(1)
    with torch.no_grad():
        if "texts" in request:
            return SentenceTransformer(folder, device="cpu").encode(request["texts"])
        config = AutoConfig.from_pretrained(folder)
        scores = any("SequenceClassification" in name for name in config.architectures)
        model = loaded(AutoModelForSequenceClassification if scores else AutoModel, folder)
        behind = [] if scores else list(modules(folder))
        vectors = []
        # One by one: nothing is padded.
        for ids, types in zip(request["ids"], request["token_types"]):
            inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
            if config.model_type in ("bert", "roberta", "xlm-roberta"):
                inputs["token_type_ids"] = torch.tensor([types])
            if scores:
                own = getattr(config, "sentence_transformers", None) or {}
                identity = own.get("activation_fn", "").endswith("Identity")
                logits = model(**inputs).logits[0]
                vectors.append((logits if identity else torch.sigmoid(logits)).numpy())
                continue
            features = {"token_embeddings": model(**inputs).last_hidden_state, "attention_mask": inputs["attention_mask"]}
            for module in behind:
                features = module(features)
            vectors.append(features["sentence_embedding"][0].numpy())
        return vectors


vectors = main(*sys.argv[1:])
print(json.dumps([base64.b64encode(numpy.asarray(vector, dtype="<f4").tobytes()).decode() for vector in vectors]))
