// Products with quantised weights as compiled graphs call them.
#include "quantized.h"
#include "torch_c.h"

// The operator `slipstream_quantized::product`. It returns 1 for what it does not compute.
extern "C" AOTITorchError aoti_torch_cpu_product(AtenTensorHandle x, const AtenTensorHandle* ids, AtenTensorHandle codes,
                                                 AtenTensorHandle scales, const AtenTensorHandle* zeros,
                                                 const AtenTensorHandle* bias, int64_t columns, int64_t group,
                                                 int64_t code, AtenTensorHandle* y) {
    if (!is_dense(x, 2) || (ids && (dtype_of(*ids) != aoti_torch_dtype_int64() || !is_dense(*ids, 1)))) return 1;
    const int32_t dtype = dtype_of(x);
    uint32_t threads = 1;
    if (code_of(dtype) < 0 || torch_get_num_threads(&threads)) return 1;
    const int64_t inputs = size_of(x, 0), rows = ids ? size_of(*ids, 0) : inputs;
    const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
    if (aoti_torch_empty_strided(2, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, y)) return 1;
    Quantized call = {};
    call.x = pointer_of(x), call.codes = pointer_of(codes), call.scales = pointer_of(scales);
    call.zeros = pointer_of(zeros), call.bias = pointer_of(bias), call.y = pointer_of(*y);
    call.ids = static_cast<const int64_t*>(pointer_of(ids));
    call.rows = rows, call.columns = columns, call.size = size_of(x, 1), call.x_stride = stride_of(x, 0);
    call.repeats = rows / (inputs > 0 ? inputs : 1), call.experts = ids ? size_of(codes, 0) : 1;
    int64_t dimensions = 0;
    aoti_torch_get_dim(scales, &dimensions);
    call.group = group, call.groups = size_of(scales, dimensions - 2);
    call.kind = code_of(dtype), call.code = code, call.threads = threads;
    multiply(call);
    return 0;
}
