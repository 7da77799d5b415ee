// A device whose memory is the host's, as an out-of-tree backend of PyTorch (PrivateUse1).
//
// Memory is allocated by malloc and counted, operators run on the CPU through PyTorch's own
// fallback, streams and events have nothing to wait for, and collectives are gloo's, on the same
// memory.  The parts are those that a backend has to register: an allocator, a device guard,
// hooks, the operators that create and view tensors, and a backend for process groups.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
constexpr size_t kMemory = size_t(1) << 34;  // bytes of a device, as it reports them

c10::DeviceIndex device_count() {
  const char* text = std::getenv("HOSTDEV_COUNT");
  return text ? static_cast<c10::DeviceIndex>(std::atoi(text)) : 2;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;
std::atomic<c10::StreamId> next_stream{1};

// ------------------------------------------------------------------------- memory

struct HostAllocator final : c10::DeviceAllocator {
  std::mutex mutex;
  std::map<void*, std::pair<size_t, c10::DeviceIndex>> blocks;
  std::map<c10::DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> stats;

  static HostAllocator& get() {
    static auto* allocator = new HostAllocator();
    return *allocator;
  }
  void count(c10::DeviceIndex device, size_t bytes, bool allocated) {
    auto& stat = stats[device];
    for (auto* array : {&stat.allocated_bytes, &stat.reserved_bytes, &stat.active_bytes}) {
      auto& sum = (*array)[0];
      allocated ? sum.increase(bytes) : sum.decrease(bytes);
    }
  }
  static void release(void* data) {
    if (!data) return;
    auto& self = get();
    {
      const std::lock_guard<std::mutex> lock(self.mutex);
      auto found = self.blocks.find(data);
      self.count(found->second.second, found->second.first, false);
      self.blocks.erase(found);
    }
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current_device);
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (data) {
      const std::lock_guard<std::mutex> lock(mutex);
      blocks[data] = {bytes, current_device};
      count(current_device, bytes, true);
    }
    return {data, data, &HostAllocator::release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &HostAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex);
    return stats[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex);
    stats[device].allocated_bytes[0].reset_peak();
    stats[device].reserved_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(mutex);
    return {kMemory - stats[device].allocated_bytes[0].current, kMemory};
  }
};

// Host memory that counts as pinned.
struct PinnedAllocator final : c10::Allocator {
  std::mutex mutex;
  std::map<const void*, size_t> blocks;

  static PinnedAllocator& get() {
    static auto* allocator = new PinnedAllocator();
    return *allocator;
  }
  static void release(void* data) {
    if (!data) return;
    {
      const std::lock_guard<std::mutex> lock(get().mutex);
      get().blocks.erase(data);
    }
    c10::free_cpu(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (data) {
      const std::lock_guard<std::mutex> lock(mutex);
      blocks[data] = bytes;
    }
    return {data, data, &PinnedAllocator::release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool contains(const void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = blocks.upper_bound(data);
    if (after == blocks.begin()) return false;
    --after;
    return data < static_cast<const char*>(after->first) + after->second;
  }
};

// ------------------------------------------------------------------------- devices and streams

struct HostGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "there is no device ", device);
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  static c10::Device indexed(c10::Device device) {
    return {kDevice, device.has_index() ? device.index() : current_device};
  }
  static c10::Stream make_stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return make_stream(device, current_streams[indexed(device).index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return make_stream(device, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  using Clock = std::chrono::steady_clock;  // an event is the time at which it was recorded
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point();
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Clock::time_point*>(second) -
                                                     *static_cast<Clock::time_point*>(first))
        .count();
  }
};

struct HostGenerator final : at::CPUGeneratorImpl {
  explicit HostGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct HostHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    HostGuard().setDevice({kDevice, index});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return HostGuard().exchangeDevice({kDevice, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::get().contains(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  at::Device getDeviceFromPtr(void* data) const override {
    auto& allocator = HostAllocator::get();
    const std::lock_guard<std::mutex> lock(allocator.mutex);
    auto block = --allocator.blocks.upper_bound(data);
    return {kDevice, block->second.second};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::map<c10::DeviceIndex, at::Generator> generators;
    if (index < 0) index = current_device;
    auto& generator = generators[index];
    if (!generator.defined()) generator = at::make_generator<HostGenerator>(index);
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<HostGenerator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceIndex before = current_device;
    current_device = storage.device().index();
    auto data = HostAllocator::get().allocate(bytes);
    current_device = before;
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept) std::memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

// ------------------------------------------------------------------------- operators

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
      tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(HostGuard::indexed(c10::device_or_default(device)));
  return at::detail::empty_generic(size, &HostAllocator::get(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(HostGuard::indexed(c10::device_or_default(device)));
  return at::detail::empty_strided_generic(size, stride, &HostAllocator::get(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_host(tensor).item(); }

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  return at::native::set_storage_meta__symint(self, storage, offset, c10::fromIntArrayRefSlow(size),
                                              c10::fromIntArrayRefSlow(stride));
}

at::Tensor& set_all_of_storage(at::Tensor& self, at::Storage storage) {
  const int64_t size = storage.nbytes() / self.dtype().itemsize();
  return set_storage(self, storage, 0, {size}, {1});
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

// The operators of process groups call their backend, which is `HostBackend`.
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_all_of_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
}

// ------------------------------------------------------------------------- process groups

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) result.push_back(on_host(tensor));
  return result;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> result;
  for (const auto& tensors : lists) result.push_back(on_host(tensors));
  return result;
}

// Gloo, on the memory of the device.
struct HostBackend final : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit HostBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}

  const std::string getBackendName() const override { return "hostccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = on_host(tensors);
    return gloo->broadcast(host, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = on_host(tensors);
    return gloo->allreduce(host, options);
  }
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override {
    auto host = on_host(tensors);
    return gloo->allreduce_coalesced(host, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = on_host(tensors);
    return gloo->reduce(host, options);
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->allgather(to, from, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return gloo->_allgather_base(to, from, options);
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override {
    auto to = on_host(outputs), from = on_host(inputs);
    return gloo->allgather_into_tensor_coalesced(to, from, options);
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs,
              const c10d::GatherOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->gather(to, from, options);
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs,
               const c10d::ScatterOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->scatter(to, from, options);
  }
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return gloo->reduce_scatter(to, from, options);
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return gloo->_reduce_scatter_base(to, from, options);
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    auto to = on_host(outputs), from = on_host(inputs);
    return gloo->reduce_scatter_tensor_coalesced(to, from, options);
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                     std::vector<int64_t>& input_sizes,
                     const c10d::AllToAllOptions& options) override {
    auto to = on_host(output), from = on_host(input);
    return gloo->alltoall_base(to, from, output_sizes, input_sizes, options);
  }
  Work send(Tensors& tensors, int rank, int tag) override {
    auto host = on_host(tensors);
    return gloo->send(host, rank, tag);
  }
  Work recv(Tensors& tensors, int rank, int tag) override {
    auto host = on_host(tensors);
    return gloo->recv(host, rank, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return gloo->barrier(options); }
};

HostGuard host_guard;
HostHooks host_hooks;

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kDevice, &HostAllocator::get());
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice)].store(&host_guard);
  at::RegisterPrivateUse1HooksInterface(&host_hooks);
  m.def("wrap_gloo", [](c10::intrusive_ptr<c10d::Backend> gloo) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<HostBackend>(std::move(gloo)));
  });
  m.def("device_count", &device_count);
  m.def("default_generator", [](c10::DeviceIndex index) {
    return host_hooks.getDefaultGenerator(index);
  });
}
