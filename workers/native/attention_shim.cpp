// Paged attention as compiled graphs call it. It calls the kernel of the forward that runs in this thread; without one,
// and for what that kernel does not do alone, it calls the operator, which is Python.
#include <cstring>

#include "paged.h"
#include "torch_c.h"

extern "C" {

// What all layers of a forward share. The struct is mirrored in workers/attention/native.py.
struct Forward {
    void (*kernel)(const Plan* plan, const Layer* layer, const Call* call);
    const Plan* plan;
    const Layer* layers;
    int64_t tokens;    // later ones are padding
    int64_t is_whole;  // whether the kernel attends all rows
};
}

namespace {

thread_local const Forward* current = nullptr;

StableIValue owned(AtenTensorHandle tensor) {
    AtenTensorHandle made = nullptr;
    aoti_torch_new_tensor_handle(tensor, &made);
    return reinterpret_cast<StableIValue>(made);
}

StableIValue bits_of(double number) {
    StableIValue value = 0;
    std::memcpy(&value, &number, sizeof number);
    return value;
}

}  // namespace

// Make a forward current in this thread; null: none is.
extern "C" void slipstream_attention_current(const Forward* forward) { current = forward; }

// The operator `slipstream::paged_attention`.
extern "C" AOTITorchError aoti_torch_cpu_paged_attention(AtenTensorHandle query, AtenTensorHandle key,
                                                         AtenTensorHandle value, const AtenTensorHandle* sinks,
                                                         int64_t layer, double scaling, int64_t window, double softcap,
                                                         int32_t window_from_block, int32_t causal_block,
                                                         AtenTensorHandle* output) {
    const int32_t dtype = dtype_of(query);
    const bool is_alone = current && current->is_whole && code_of(dtype) >= 0 && is_dense(query, 4) &&
                          is_dense(key, 4) && is_dense(value, 4) &&
                          (!sinks || (dtype_of(*sinks) == aoti_torch_dtype_float32() && is_dense(*sinks, 1)));
    if (!is_alone) {
        StableIValue* sink = sinks ? new StableIValue(owned(*sinks)) : nullptr;  // is deleted by what is called
        StableIValue stack[] = {owned(query),
                                owned(key),
                                owned(value),
                                reinterpret_cast<StableIValue>(sink),
                                static_cast<StableIValue>(layer),
                                bits_of(scaling),
                                static_cast<StableIValue>(window),
                                bits_of(softcap),
                                window_from_block != 0,
                                causal_block != 0};
        if (aoti_torch_call_dispatcher("slipstream::paged_attention", "", stack)) return 1;
        *output = reinterpret_cast<AtenTensorHandle>(stack[0]);
        return 0;
    }
    const int64_t heads = size_of(query, 1), tokens = size_of(query, 2), width = heads * size_of(value, 3);
    const int64_t sizes[] = {1, tokens, heads, size_of(value, 3)};
    const int64_t strides[] = {tokens * width, width, sizes[3], 1};
    if (aoti_torch_empty_strided(4, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, output)) return 1;
    auto* attended = static_cast<uint8_t*>(pointer_of(*output));
    const int64_t token_bytes = width * (code_of(dtype) == 0 ? 4 : 2);
    if (tokens > current->tokens)
        std::memset(attended + current->tokens * token_bytes, 0, (tokens - current->tokens) * token_bytes);
    Layer described = current->layers[layer];
    described.heads = heads, described.computed = code_of(dtype);
    Call call = {};
    call.query = pointer_of(query), call.key = pointer_of(key), call.value = pointer_of(value), call.output = attended;
    call.query_head = stride_of(query, 1), call.query_token = stride_of(query, 2);
    call.key_head = stride_of(key, 1), call.key_token = stride_of(key, 2);
    call.value_head = stride_of(value, 1), call.value_token = stride_of(value, 2);
    call.sinks = static_cast<const float*>(pointer_of(sinks));
    call.scaling = static_cast<float>(scaling), call.softcap = static_cast<float>(softcap), call.window = window;
    call.window_from_block = window_from_block != 0, call.causal_block = causal_block != 0;
    current->kernel(current->plan, &described, &call);
    return 0;
}
