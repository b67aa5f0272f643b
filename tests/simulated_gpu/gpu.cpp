// A CUDA device for torch's CPU build. Each storage on the card has a twin in main memory (Block): an operator on the card is
// the CPU's on the twins, and what it allocates is counted against the card's memory. gpu.py loads this, and has the rest.
// What a real card does later is done later here: a copy between the card and pinned memory that is not blocking ends at the
// next time the host waits.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/equal.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>
#include <mutex>
#include <set>

using at::Tensor;
using c10::Device, c10::DeviceType, c10::DispatchKey, c10::DispatchKeySet, c10::Storage, c10::Stream;

namespace {

std::atomic<int> current = 0, cards = 1;
std::atomic<int64_t> used = 0, peak = 0, room = INT64_MAX, waits = 0;

Device card() { return Device(DeviceType::CUDA, c10::DeviceIndex(current)); }
const DispatchKeySet computing = DispatchKeySet(DispatchKey::CPU);

// ----- What torch asks of a device: it has a single stream -----------------------------------------------------------
struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return card(); }
  Device exchangeDevice(Device) const override { return card(); }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(cards); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, card()); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct PinnedMemory final : c10::Allocator {
  static inline std::mutex mutex;  // data are read, and pinned, in a thread of their own
  static inline std::set<const void*> blocks;
  static void release(void* data) {
    std::scoped_lock lock(mutex);
    blocks.erase(data);
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::scoped_lock lock(mutex);
    blocks.insert(data);
    return {data, data, release, DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
} pinned_memory;
// ----- Memory ----------------------------------------------------------------------------------------------------
struct Block {  // behind the data pointer of a storage on the card
  Storage twin;
  int64_t bytes;  // what it takes of the card's memory: torch's allocator rounds up to 512
  static void release(void* block) {
    used -= static_cast<Block*>(block)->bytes;
    delete static_cast<Block*>(block);
  }
};

Storage adopt(const Storage& twin) {
  int64_t bytes = (int64_t(twin.nbytes()) + 511) / 512 * 512;
  TORCH_CHECK_WITH(OutOfMemoryError, used + bytes <= room, "CUDA out of memory. Tried to allocate ", bytes,
                   " bytes. The simulated GPU has ", room.load(), ", of which ", used.load(), " are in use.");
  used += bytes;
  if (used > peak) peak = used.load();
  auto* block = new Block{twin, bytes};
  c10::DataPtr data(const_cast<void*>(twin.data()), block, Block::release, card());
  return Storage(Storage::use_byte_size_t(), twin.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
}

// a tensor of the shape, dtype and place of another one, in this storage
Tensor tensor_in(Storage storage, const Tensor& like) {
  auto key = storage.device_type() == DeviceType::CUDA ? DispatchKeySet(DispatchKey::CUDA) : computing;
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Tensor twin_of(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  return tensor_in(static_cast<Block*>(t.storage().data_ptr().get_context())->twin, t);
}

// ----- Copies, and when the host waits ------------------------------------------------------------------------------
struct Copy {
  Tensor host, contents;
  bool to_card;
};
std::vector<Copy> under_way;
void wait() {
  ++waits;
  for (auto& copy : std::exchange(under_way, {})) {
    if (!copy.to_card) copy.host.copy_(copy.contents);
    TORCH_CHECK(at::equal(copy.host, copy.contents), "pinned memory has changed before its copy to the card has ended");
  }
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  const Tensor& host_side = to.is_cuda() ? from : to;
  bool crosses = !host_side.is_cuda();
  bool late = crosses && non_blocking && host_side.is_pinned();
  if (crosses && !late) wait();
  twin_of(to).copy_(twin_of(from));
  if (late) under_way.push_back({host_side.detach(), host_side.clone(), to.is_cuda()});
  if (late && !to.is_cuda()) host_side.detach().view(-1).view(at::kByte).fill_(0xFF);  // NaN until the copy has ended
  return to;
}

at::Scalar item(const Tensor& t) {
  wait();
  return twin_of(t).item();
}

// ----- All other operators ------------------------------------------------------------------------------------------
template <class Change>
void change_tensors(c10::Stack* stack, size_t last, Change change) {
  for (auto value = stack->end() - last; value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = change(value->toTensor());
    } else if (value->isTensorList()) {
      auto tensors = value->toTensorVector();
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), change);
      *value = tensors;
    } else if (value->isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (std::optional<Tensor> t : value->toOptionalTensorVector()) tensors.push_back(t ? change(*t) : t);
      *value = tensors;
    } else if (value->isDevice()) {
      *value = Device(DeviceType::CPU);
    }
  }
}

void compute(const c10::OperatorHandle& op, c10::Stack* stack) {
  static const std::set<std::string> sizes_depend_on_contents = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount", "aten::equal"};
  waits += sizes_depend_on_contents.contains(op.schema().name());
  std::vector<std::pair<Tensor, Tensor>> lent;  // (on the card, its twin)
  change_tensors(stack, op.schema().arguments().size(), [&](const Tensor& t) {
    Tensor twin = twin_of(t);
    if (!twin.is_same(t)) lent.emplace_back(t, twin);
    return twin;
  });
  op.redispatchBoxed(computing, stack);
  for (auto& [t, twin] : lent) {  // an operator may give its output another size
    if (twin.storage().nbytes() != t.storage().nbytes()) t.unsafeGetTensorImpl()->set_storage_keep_dtype(adopt(twin.storage()));
    t.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
  }
  change_tensors(stack, op.schema().returns().size(), [&](const Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [own, twin] : lent)
      if (twin.is_same(t)) return own;
    for (auto& [own, twin] : lent)
      if (t.storage().is_alias_of(twin.storage())) return tensor_in(own.storage(), t);  // a view
    return tensor_in(adopt(t.storage()), t);
  });
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", item);
}
TORCH_LIBRARY(card, m) {  // torch.ops.card
  m.def("insert", [](int64_t number, int64_t bytes) { cards = int(number); room = bytes; });
  m.def("select", [](int64_t index) { current = int(index); });
  m.def("limit", [](int64_t bytes) { room = bytes; });
  m.def("used", [] { return used.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = used.load(); });
  m.def("waits", [] { return waits.load(); });
  m.def("synchronize", [] { wait(); });
}

}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {  // torch looks for a class of this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(cards); }
  DeviceIndex getCurrentDevice() const override { return card().index(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
  bool isPinnedPtr(const void* data) const override {
    std::scoped_lock lock(PinnedMemory::mutex);
    return PinnedMemory::blocks.contains(data);
  }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
