// What shims use of torch's stable C interface, as torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h
// declare it. A shim is a function that compiled graphs call in place of an operator, without torch's dispatcher.
#pragma once
#include <cstdint>

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using AOTITorchError = int32_t;
using StableIValue = uint64_t;

extern "C" {
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** pointer);
AOTITorchError aoti_torch_get_size(AtenTensorHandle tensor, int64_t dimension, int64_t* size);
AOTITorchError aoti_torch_get_stride(AtenTensorHandle tensor, int64_t dimension, int64_t* stride);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dimensions);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* made);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* made);
AOTITorchError aoti_torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack);
AOTITorchError torch_get_num_threads(uint32_t* number);
int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_int64();
}

namespace {

inline void* pointer_of(AtenTensorHandle tensor) {
    void* pointer = nullptr;
    aoti_torch_get_data_ptr(tensor, &pointer);
    return pointer;
}

inline void* pointer_of(const AtenTensorHandle* tensor) { return tensor ? pointer_of(*tensor) : nullptr; }

inline int64_t size_of(AtenTensorHandle tensor, int64_t dimension) {
    int64_t size = 0;
    aoti_torch_get_size(tensor, dimension, &size);
    return size;
}

inline int64_t stride_of(AtenTensorHandle tensor, int64_t dimension) {
    int64_t stride = 1;
    aoti_torch_get_stride(tensor, dimension, &stride);
    return stride;
}

// Whether the elements of a tensor of so many dimensions follow one another along the last of them.
inline bool is_dense(AtenTensorHandle tensor, int64_t dimensions) {
    return stride_of(tensor, dimensions - 1) == 1 || size_of(tensor, dimensions - 1) == 1;
}

inline int32_t dtype_of(AtenTensorHandle tensor) {
    int32_t dtype = -1;
    aoti_torch_get_dtype(tensor, &dtype);
    return dtype;
}

// The number that stands for a dtype in arguments of kernels (workers/native/dtypes.py); -1: none.
inline int64_t code_of(int32_t dtype) {
    if (dtype == aoti_torch_dtype_float32()) return 0;
    if (dtype == aoti_torch_dtype_bfloat16()) return 1;
    return dtype == aoti_torch_dtype_float16() ? 2 : -1;
}

}  // namespace
