"""Embeds through the real OpenAI SDK, which asks for base64 by itself.

    embeddings.py BASE_URL MODEL
"""

import math
import sys

from openai import BadRequestError, OpenAI


def dot(one, other):
    return sum(a * b for a, b in zip(one, other))


def refused(call, *words):
    try:
        call()
    except BadRequestError as error:
        assert all(word in str(error) for word in words), error
        return error
    raise AssertionError(f"nothing said {words}")


def main(base_url, model):
    client = OpenAI(base_url=base_url, api_key="any", max_retries=0)
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
    response = client.embeddings.create(model=model, input=texts, user="tester")
    vectors = [one.embedding for one in response.data]
    assert [one.index for one in response.data] == [0, 1, 2] and {len(one) for one in vectors} == {384}
    assert all(abs(dot(one, one) - 1) < 1e-4 for one in vectors)
    # As sentence-transformers' documentation has them: 0.7554 and less than a fifth.
    near, far = dot(vectors[0], vectors[1]), dot(vectors[0], vectors[2])
    assert abs(near - 0.7554) < 1e-3 and far < 0.2, (near, far)
    assert response.usage.prompt_tokens == response.usage.total_tokens == 28, response.usage
    floats = client.embeddings.create(model=model, input=texts[0], encoding_format="float").data[0].embedding
    assert max(abs(a - b) for a, b in zip(floats, vectors[0])) < 1e-6
    short = client.embeddings.create(model=model, input=texts[0], dimensions=64).data[0].embedding
    length = math.sqrt(dot(floats[:64], floats[:64]))
    assert len(short) == 64 and max(abs(a - b / length) for a, b in zip(short, floats)) < 1e-5
    ids = [101, 1037, 2158, 2003, 5983, 2833, 1012, 102]
    tokens = client.embeddings.create(model=model, input=[ids, ids]).data
    assert max(abs(a - b) for a, b in zip(tokens[1].embedding, vectors[0])) < 1e-5
    long = "word " * 300
    refused(lambda: client.embeddings.create(model=model, input=long), "256 tokens", "302")
    cut = client.embeddings.create(model=model, input=long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == 256, cut.usage
    refused(lambda: client.embeddings.create(model=model, input=[]), "input")
    refused(lambda: client.embeddings.create(model=model, input="a", extra_body={"task": "x"}), "`task`")
    messages = [{"role": "user", "content": "hi"}]
    refused(lambda: client.chat.completions.create(model=model, messages=messages), "/v1/embeddings")
    refused(lambda: client.embeddings.create(model="smoke", input="a"), "/v1/chat/completions")
    print(f"{len(texts)} texts: near {near:.4f}, far {far:.4f}")


main(*sys.argv[1:])
