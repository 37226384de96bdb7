"""Snippets and commands written for vLLM and vLLM Ascend, unchanged."""

HEAD = """
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
"""
TAIL = """
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
DRAFT_MODEL = (
    HEAD
    + """
llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_config={
        "model": "facebook/opt-125m",
        "num_speculative_tokens": 5,
    },
)
"""
    + TAIL
)
NGRAM = (
    HEAD
    + """
llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)
"""
    + TAIL
)
NGRAM_ASCEND = NGRAM.replace("facebook/opt-6.7b", "meta-llama/Meta-Llama-3.1-8B-Instruct")
MLP_SPECULATOR = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "ibm-ai-platform/llama3-70b-accelerator",
        "draft_tensor_parallel_size": 1,
    },
)
"""
    + TAIL
)
EAGLE = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "draft_tensor_parallel_size": 1,
    },
)
"""
    + TAIL
)
EAGLE_ASCEND = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    tensor_parallel_size=4,
    distributed_executor_backend="mp",
    enforce_eager=True,
    async_scheduling=True,
    speculative_config={
        "method": "eagle",
        "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 2,
    },
)
"""
    + TAIL
)
SUFFIX = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    tensor_parallel_size=1,
    enforce_eager=True,
    speculative_config={
        "method": "suffix",
        "num_speculative_tokens": 15,
    },
)
"""
    + TAIL
)
TARGET_ALONE = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    use_v2_block_manager=True,
)
sampling_params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2, top_k=1)
prompts = [
'I am at KDD conference in Barcelona. After the conference tutorial today I will be presenting a paper on the topic of “The role of the brain in the development',
]
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Generated text: {generated_text!r}")
sampling_params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1, top_k=1)
prompts = [
'I am at KDD conference in Barcelona. After the conference tutorial today I will be presenting a paper on the topic of “The role of the brain in the development of',
]
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Generated text: {generated_text!r}")
"""  # noqa: E501 - as it was written
SERVE = """
python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 --model facebook/opt-6.7b \\
    --seed 42 -tp 1 --gpu_memory_utilization 0.8 \\
    --speculative_config '{"model": "facebook/opt-125m", "num_speculative_tokens": 5}'
"""
CLIENT = """
from openai import OpenAI

# Modify OpenAI's API key and API base to use vLLM's API server.
openai_api_key = "EMPTY"
openai_api_base = "http://localhost:8000/v1"

client = OpenAI(
    # defaults to os.environ.get("OPENAI_API_KEY")
    api_key=openai_api_key,
    base_url=openai_api_base,
)

models = client.models.list()
model = models.data[0].id

# Completion API
stream = False
completion = client.completions.create(
    model=model,
    prompt="The future of AI is",
    echo=False,
    n=1,
    stream=stream,
)

print("Completion results:")
if stream:
    for c in completion:
        print(c)
else:
    print(completion)
"""
SERVE_MTP = """
vllm serve /deepseek-ai/DeepSeek-V3.2-Exp-W8A8 \\
  --port 20004 \\
  --data-parallel-size 1 \\
  --tensor-parallel-size 16 \\
  --enable-expert-parallel \\
  --seed 1024 \\
  --served-model-name dsv3 \\
  --max-model-len 36768 \\
  --max-num-batched-tokens 5000 \\
  --max-num-seqs 10 \\
  --quantization ascend \\
  --trust-remote-code \\
  --gpu-memory-utilization 0.9 \\
  --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' \\
  --speculative-config '{"num_speculative_tokens": 2, "method":"deepseek_mtp", "disable_padded_drafter_batch": "False"}'
"""


# The removed flags of the same documents, as scripts still have them.
SERVE_REMOVED = """
python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 --model facebook/opt-6.7b \\
    --seed 42 -tp 1 --speculative_model facebook/opt-125m --use-v2-block-manager \\
    --num_speculative_tokens 5 --gpu_memory_utilization 0.8
"""
HEADS = {
    "mlp_speculator": (MLP_SPECULATOR, ("mlp_speculator", 5)),
    "eagle": (EAGLE, ("eagle", 5)),
    "eagle on ascend": (EAGLE_ASCEND, ("eagle", 2)),
    "suffix": (SUFFIX, ("suffix", 15)),
}
TARGETS = (
    "facebook/opt-6.7b",
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-70B-Instruct",
)
DRAFTS = (
    "facebook/opt-125m",
    "ibm-ai-platform/llama3-70b-accelerator",
    "yuhuili/EAGLE-LLaMA3-Instruct-8B",
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
)
