// Collectives between processes: tensors are copied to the host, where gloo sends them, and back.
#include "process_group.h"

#include <map>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "kernels.h"

namespace sim {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Send = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;

// As with NCCL: `wait` lets the current stream wait, and not the caller.
class StagedWork final : public c10d::Work {
 public:
  StagedWork(int rank, c10d::OpType kind, const Mark& end, const Tensors& results, Stream& stream)
      : c10d::Work(rank, kind), end_(end), results_(results) {
    std::vector<c10::Device> devices{stream.handle().device()};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    c10::StreamGuard guard(stream.handle());
    future_->markCompleted(c10::IValue(results_));
  }
  bool isCompleted() override {
    end_.stream->want(end_.number);
    return end_.is_done();
  }
  bool isSuccess() const override { return end_.is_done(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override { wait_for(current_stream(end_.stream->device()), end_); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const Mark end_;
  const Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors flatten(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const Tensors& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Copies of tensors on the host, in their order.
struct Staged {
  explicit Staged(const Tensors& tensors) {
    for (const Tensor& tensor : tensors)
      views.push_back(host_tensor(tensor));
  }
  void read() {
    for (const Tensor& view : views)
      copies.push_back(view.clone(at::MemoryFormat::Contiguous));
  }
  void write() {
    for (size_t i = 0; i < views.size(); ++i)
      views[i].copy_(copies[i]);
  }
  std::vector<Tensors> lists(size_t count, size_t length) const {
    std::vector<Tensors> all(count);
    for (size_t i = 0; i < copies.size(); ++i)
      all[i / length].push_back(copies[i]);
    return all;
  }
  Tensors views, copies;
};

class StagedGroup final : public c10d::Backend {
 public:
  explicit StagedGroup(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host_(std::move(host)) {}

  const std::string getBackendName() const override { return "simccl"; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return send(c10d::OpType::BROADCAST, tensors, {}, [=](c10d::Backend& host, Staged& all, Staged&) {
      return host.broadcast(all.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return send(c10d::OpType::ALLREDUCE, tensors, {}, [=](c10d::Backend& host, Staged& all, Staged&) {
      return host.allreduce(all.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return send(c10d::OpType::ALLREDUCE_COALESCED, tensors, {}, [=](c10d::Backend& host, Staged& all, Staged&) {
      return host.allreduce_coalesced(all.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return send(c10d::OpType::REDUCE, tensors, {}, [=](c10d::Backend& host, Staged& all, Staged&) {
      return host.reduce(all.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return send(c10d::OpType::ALLGATHER, flatten(outputs), inputs, [=](auto& host, Staged& out, Staged& in) {
      auto lists = out.lists(in.copies.size(), getSize());
      return host.allgather(lists, in.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return send(c10d::OpType::_ALLGATHER_BASE, {output}, {input}, [=](auto& host, Staged& out, Staged& in) {
      return host._allgather_base(out.copies[0], in.copies[0], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return send(c10d::OpType::COALESCED, outputs, inputs, [=](auto& host, Staged& out, Staged& in) {
      return host.allgather_into_tensor_coalesced(out.copies, in.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return send(c10d::OpType::GATHER, flatten(outputs), inputs, [=](auto& host, Staged& out, Staged& in) {
      auto lists = out.copies.empty() ? std::vector<Tensors>() : out.lists(1, getSize());
      return host.gather(lists, in.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return send(c10d::OpType::SCATTER, outputs, flatten(inputs), [=](auto& host, Staged& out, Staged& in) {
      auto lists = in.copies.empty() ? std::vector<Tensors>() : in.lists(1, getSize());
      return host.scatter(out.copies, lists, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return send(c10d::OpType::REDUCE_SCATTER, outputs, flatten(inputs), [=](auto& host, Staged& out, Staged& in) {
      auto lists = in.lists(out.copies.size(), getSize());
      return host.reduce_scatter(out.copies, lists, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return send(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input}, [=](auto& host, Staged& out, Staged& in) {
      return host._reduce_scatter_base(out.copies[0], in.copies[0], options);
    });
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return send(c10d::OpType::COALESCED, outputs, inputs, [=](auto& host, Staged& out, Staged& in) {
      return host.reduce_scatter_tensor_coalesced(out.copies, in.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return send(c10d::OpType::ALLTOALL_BASE, {output}, {input},
                [=](auto& host, Staged& out, Staged& in) mutable {
                  return host.alltoall_base(out.copies[0], in.copies[0], output_sizes, input_sizes, options);
                });
  }
  c10::intrusive_ptr<c10d::Work> alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return send(c10d::OpType::ALLTOALL, outputs, inputs, [=](auto& host, Staged& out, Staged& in) {
      return host.alltoall(out.copies, in.copies, options);
    });
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int rank, int tag) override {
    return send(c10d::OpType::SEND, {}, tensors, [=](c10d::Backend& host, Staged&, Staged& in) {
      return host.send(in.copies, rank, tag);
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int rank, int tag) override {
    return send(c10d::OpType::RECV, tensors, {}, [=](c10d::Backend& host, Staged& out, Staged&) {
      return host.recv(out.copies, rank, tag);
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    synchronize_device(current_device());
    return host_->barrier(c10d::BarrierOptions{{}, options.timeout, {}, options.asyncOp});
  }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void shutdown() override {
    for (auto& [device, stream] : streams_)
      stream->wait();
    host_->shutdown();
  }
  void abort() override { host_->abort(); }

 private:
  template <typename Function>
  c10::intrusive_ptr<c10d::Work> send(c10d::OpType kind, const Tensors& outputs, const Tensors& inputs,
                                      Function function) {
    const Tensor& any = outputs.empty() ? inputs.at(0) : outputs.at(0);
    const int device = any.device().index();
    Stream& stream = stream_on(device);
    wait_for(stream, mark(current_stream(device)));
    for (const Tensors* tensors : {&outputs, &inputs})
      for (const Tensor& tensor : *tensors)
        device_allocator().recordStream(tensor.storage().data_ptr(), stream.handle());
    auto out = std::make_shared<Staged>(outputs), in = std::make_shared<Staged>(inputs);
    auto host = host_;
    stream.launch([=]() mutable {
      out->read();
      in->read();
      function(*host, *out, *in)->wait();
      out->write();
    });
    return c10::make_intrusive<StagedWork>(getRank(), kind, mark(stream), outputs, stream);
  }

  // Collectives have a stream of their own, which is never late: other processes wait for them.
  Stream& stream_on(int device) {
    auto& stream = streams_[device];
    if (!stream) {
      stream = &stream_of(stream_from_pool(device));
      stream->make_prompt();
    }
    return *stream;
  }

  const c10::intrusive_ptr<c10d::Backend> host_;
  std::map<int, Stream*> streams_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> stage(c10::intrusive_ptr<c10d::Backend> host) {
  return c10::make_intrusive<StagedGroup>(std::move(host));
}

} // namespace sim
