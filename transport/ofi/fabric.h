// SPDX-License-Identifier: MIT
// What one rank opens of libfabric: a domain and one endpoint with one completion queue. One thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../../lib/file_descriptor.h"
#include "../../lib/socket.h"
#include "library.h"

namespace mk::ofi {

struct CloseFid {
  template <class OBJECT>
  void operator()(OBJECT* object) const {
    fi_close(&object->fid);
  }
};
template <class OBJECT>
using Fid = std::unique_ptr<OBJECT, CloseFid>;

class Fabric {
 public:
  // Whether `provider` is there with what this backend needs.
  static Status probe(const Library& library, const std::string& provider);
  // `source`: the address to bind to, for providers with IP addresses. `operations`: how many may be under way.
  static Result<std::unique_ptr<Fabric>> open(const Library& library, const std::string& provider,
                                              const SocketAddress& source, size_t operations);
  ~Fabric();
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const char* provider() const { return info_->fabric_attr->prov_name; }
  // Peers write to addresses, not to offsets in the region.
  bool virtual_addresses() const { return (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0; }
  size_t largest_write() const { return info_->ep_attr->max_msg_size; }

  // The endpoint's address in the provider's form.
  Result<std::vector<std::byte>> name() const;
  Result<fi_addr_t> add_peer(const std::vector<std::byte>& name);
  // Registers memory. Its key is random where the provider lets us choose, so that no stranger guesses it.
  Result<Fid<fid_mr>> register_memory(void* base, size_t bytes, uint64_t access);

  // Ends what is under way; the buffers of it are free afterwards.
  void close_endpoint() { endpoint_.reset(); }

  fid_ep* endpoint() const { return endpoint_.get(); }
  fid_cq* queue() const { return queue_.get(); }
  // Readable when the queue has something; -1: the provider has no such descriptor.
  int wait_descriptor() const { return wait_descriptor_; }
  // Whether one may sleep on the descriptor now.
  bool may_sleep();

  Status error(const char* what, ssize_t result) const;
  std::string describe_completion_error(const fi_cq_err_entry& entry) const;

 private:
  explicit Fabric(const Library& library) : library_(library) {}
  Status find(const std::string& provider, const SocketAddress& source);
  Status open_queue(size_t operations);

  const Library& library_;
  fi_info* info_ = nullptr;
  // Closed from the last to the first.
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> addresses_;
  Fid<fid_cq> queue_;
  Fid<fid_ep> endpoint_;
  int wait_descriptor_ = -1;
};

}  // namespace mk::ofi
