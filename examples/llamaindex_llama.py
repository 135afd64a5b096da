"""LlamaIndex's LlamaCPP on oallama's engine.

pip install oallama llama-index-core
pip install --no-deps llama-index-llms-llama-cpp    # oallama brings the llama-cpp-python that it asks for

python examples/llamaindex_llama.py model.gguf "The capital of France is"
"""

from __future__ import annotations

import sys

import oallama  # noqa: F401  # from here on `import llama_cpp` is oallama's engine

# isort: split
from llama_index.llms.llama_cpp import LlamaCPP


def main(model: str, question: str) -> None:
    llm = LlamaCPP(model_path=model, context_window=512, max_new_tokens=16, temperature=0.0, verbose=False)
    for piece in llm.stream_complete(question):
        print(piece.delta, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
