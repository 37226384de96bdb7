// A device guard for CUDA that does nothing: torch of a CPU build then indexes tensors that only claim to be on a GPU.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct PretendGuard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, PretendGuard)
