"""The distributions from which mlx-lm would sample, for cases as JSON on stdin: for each a list of probabilities, on
stdout. A case has logits, the parameters of the sampler, and the tokens so far for penalties. mlx-lm has no typical
sampling; here it is as Meister et al. define it."""
import json
import math
import sys

import mlx.core as mx
from mlx_lm import sample_utils


def typical(logits, mass):
    """The logits of the tokens whose surprise is nearest to the entropy, down to a mass."""
    total = math.log(sum(math.exp(logit) for logit in logits))
    surprise = [total - logit for logit in logits]
    entropy = sum(math.exp(-value) * value for value in surprise)
    kept, sum_of_kept = set(), 0.0
    for token in sorted(range(len(logits)), key=lambda token: abs(surprise[token] - entropy)):
        if sum_of_kept >= mass:
            break
        kept.add(token)
        sum_of_kept += math.exp(-surprise[token])
    return [logit if token in kept else -math.inf for token, logit in enumerate(logits)]


def distribution(case):
    logits = mx.array([case["logits"]], dtype=mx.float32)
    for processor in sample_utils.make_logits_processors(
        logit_bias={int(token): bias for token, bias in case.get("logit_bias", {}).items()} or None,
        repetition_penalty=case.get("repetition_penalty"), repetition_context_size=1000,
    ):
        logits = processor(mx.array(case["tokens"]), logits)
    if "typical_p" in case:
        logits = mx.array([typical(logits[0].tolist(), case["typical_p"])], dtype=mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 0 < case.get("top_p", 1) < 1:
        logprobs = sample_utils.apply_top_p(logprobs, case["top_p"])
    if case.get("min_p"):
        logprobs = sample_utils.apply_min_p(logprobs, case["min_p"])
    # A probability of 1: whether it happens is a draw of its own.
    if case.get("xtc_threshold"):
        logprobs = sample_utils.apply_xtc(logprobs, 1.0, case["xtc_threshold"], [])
    if case.get("top_k"):
        logprobs = sample_utils.apply_top_k(logprobs, case["top_k"])
    if case["temperature"] < 1e-6:
        best = int(mx.argmax(logprobs, axis=-1).item())
        return [float(token == best) for token in range(len(case["logits"]))]
    scaled = [logprob / case["temperature"] for logprob in logprobs[0].tolist()]
    most = max(scaled)
    weights = [math.exp(value - most) for value in scaled]
    return [weight / sum(weights) for weight in weights]


json.dump([distribution(case) for case in json.load(sys.stdin)], sys.stdout)
