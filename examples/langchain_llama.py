"""LangChain's LlamaCpp on oallama's engine: pip install oallama langchain-community

python examples/langchain_llama.py model.gguf "The capital of France is"
"""

from __future__ import annotations

import sys

import oallama  # noqa: F401  # from here on `import llama_cpp` is oallama's engine

# isort: split
from langchain_community.llms import LlamaCpp
from langchain_core.prompts import PromptTemplate


def main(model: str, question: str) -> None:
    sampling = {"max_tokens": 16, "temperature": 0.0, "repeat_penalty": 1.0}
    # LangChain gives every model RoPE's base of the first LLaMA; 0 takes the model's own.
    llm = LlamaCpp(model_path=model, n_ctx=512, rope_freq_base=0.0, verbose=False, **sampling)
    chain = PromptTemplate.from_template("{question}") | llm
    for piece in chain.stream({"question": question}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
