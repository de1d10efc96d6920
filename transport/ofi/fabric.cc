// SPDX-License-Identifier: MIT
#include "fabric.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "wire.h"

namespace mk::ofi {
namespace {

// The interface asked for: the oldest that has all we use, so that any libfabric since then will do.
constexpr uint32_t kInterface = FI_VERSION(1, 14);
// A random key may be taken already.
constexpr int kKeyAttempts = 8;

using Info = std::unique_ptr<fi_info, decltype(&::fi_freeinfo)>;

Info make_hints(const Library& library, const std::string& provider) {
  Info hints(library.dupinfo(nullptr), library.freeinfo);
  if (!hints) return hints;
  hints->caps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  hints->fabric_attr->prov_name = strdup(provider.c_str());
  return hints;
}

// libfabric's first match; empty with the reason in *result.
Info query(const Library& library, const std::string& provider, const char* source, int* result) {
  Info found(nullptr, library.freeinfo);
  const Info hints = make_hints(library, provider);
  *result = -FI_ENOMEM;
  if (!hints) return found;
  fi_info* list = nullptr;
  *result = library.getinfo(kInterface, source, nullptr, source != nullptr ? uint64_t{FI_SOURCE} : 0,
                            hints.get(), &list);
  if (*result == 0) found.reset(list);
  return found;
}

Status no_provider(const Library& library, const std::string& provider, const std::string& source, int result) {
  const uint32_t version = library.version();
  return Status(
      MK_ERROR_UNSUPPORTED,
      format("libfabric %u.%u has no provider \"%s\" with reliable datagrams, remote writes and "
             "FI_DELIVERY_COMPLETE%s: %s; `fi_info -t FI_EP_RDM` lists what there is, MK_OFI_PROVIDER "
             "chooses",
             FI_MAJOR(version), FI_MINOR(version), provider.c_str(),
             source.empty() ? "" : (" at " + source).c_str(), describe(library, result).c_str()));
}

bool has_ip_addresses(const fi_info& info) {
  return info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
         info.addr_format == FI_SOCKADDR_IN6;
}

// "10.0.0.1", without the port.
std::string host_text(SocketAddress address) {
  address.port = 0;
  std::string text = address.text();
  text.resize(text.rfind(':'));
  if (address.family == 6) text = text.substr(1, text.size() - 2);
  return text;
}

}  // namespace

Status Fabric::probe(const Library& library, const std::string& provider) {
  int result = 0;
  if (query(library, provider, nullptr, &result)) return {};
  return no_provider(library, provider, "", result);
}

Status Fabric::find(const std::string& provider, const SocketAddress& source) {
  int result = 0;
  Info info = query(library_, provider, nullptr, &result);
  if (!info) return no_provider(library_, provider, "", result);
  if (has_ip_addresses(*info) && source.valid()) {
    const std::string text = host_text(source);
    info = query(library_, provider, text.c_str(), &result);
    if (!info) return no_provider(library_, provider, text, result);
  }
  info_ = library_.dupinfo(info.get());
  if (info_ == nullptr) return Status(MK_ERROR_OUT_OF_MEMORY, "libfabric: no memory for its own description");
  return {};
}

Status Fabric::error(const char* what, ssize_t result) const {
  return Status(MK_ERROR_SYSTEM,
                format("libfabric provider %s: %s failed: %s", info_ != nullptr ? provider() : "?", what,
                       describe(library_, result).c_str()));
}

Status Fabric::open_queue(size_t operations) {
  fi_cq_attr attributes{};
  attributes.size = operations;
  attributes.format = FI_CQ_FORMAT_MSG;
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* queue = nullptr;
  int result = fi_cq_open(domain_.get(), &attributes, &queue, nullptr);
  if (result == 0) {
    queue_.reset(queue);
    int descriptor = -1;
    if (fi_control(&queue->fid, FI_GETWAIT, &descriptor) == 0) wait_descriptor_ = descriptor;
    return {};
  }
  attributes.wait_obj = FI_WAIT_NONE;
  result = fi_cq_open(domain_.get(), &attributes, &queue, nullptr);
  if (result != 0) return error("fi_cq_open", result);
  queue_.reset(queue);
  return {};
}

Result<std::unique_ptr<Fabric>> Fabric::open(const Library& library, const std::string& provider,
                                             const SocketAddress& source, size_t operations) {
  std::unique_ptr<Fabric> made(new Fabric(library));
  MK_RETURN_IF_ERROR(made->find(provider, source));
  fi_info* info = made->info_;
  // The provider's default queues may take hundreds of megabytes.
  info->tx_attr->size = std::min(info->tx_attr->size, operations);
  info->rx_attr->size = std::min(info->rx_attr->size, operations);
  fid_fabric* fabric = nullptr;
  int result = library.fabric(info->fabric_attr, &fabric, nullptr);
  if (result != 0) return made->error("fi_fabric", result);
  made->fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  result = fi_domain(fabric, info, &domain, nullptr);
  if (result != 0) return made->error("fi_domain", result);
  made->domain_.reset(domain);
  fi_av_attr av{};
  av.type = info->domain_attr->av_type;
  fid_av* addresses = nullptr;
  result = fi_av_open(domain, &av, &addresses, nullptr);
  if (result != 0) return made->error("fi_av_open", result);
  made->addresses_.reset(addresses);
  MK_RETURN_IF_ERROR(made->open_queue(operations));
  fid_ep* endpoint = nullptr;
  result = fi_endpoint(domain, info, &endpoint, nullptr);
  if (result != 0) return made->error("fi_endpoint", result);
  made->endpoint_.reset(endpoint);
  result = fi_ep_bind(endpoint, &addresses->fid, 0);
  if (result == 0) result = fi_ep_bind(endpoint, &made->queue_->fid, FI_TRANSMIT | FI_RECV);
  if (result != 0) return made->error("fi_ep_bind", result);
  result = fi_enable(endpoint);
  if (result != 0) return made->error("fi_enable", result);
  return made;
}

Fabric::~Fabric() {
  endpoint_.reset();
  queue_.reset();
  addresses_.reset();
  domain_.reset();
  fabric_.reset();
  if (info_ != nullptr) library_.freeinfo(info_);
}

Result<std::vector<std::byte>> Fabric::name() const {
  std::vector<std::byte> name(kMaxAddressBytes);
  size_t bytes = name.size();
  const int result = fi_getname(&endpoint_->fid, name.data(), &bytes);
  if (result != 0) return error("fi_getname", result);
  name.resize(bytes);
  return name;
}

Result<fi_addr_t> Fabric::add_peer(const std::vector<std::byte>& name) {
  // The provider reads as many bytes as its addresses have.
  std::vector<std::byte> padded(name);
  padded.resize(kMaxAddressBytes);
  fi_addr_t address = FI_ADDR_NOTAVAIL;
  const int result = fi_av_insert(addresses_.get(), padded.data(), 1, &address, 0, nullptr);
  if (result != 1 || address == FI_ADDR_NOTAVAIL) {
    return error("fi_av_insert", result < 0 ? result : -FI_EADDRNOTAVAIL);
  }
  return address;
}

Result<Fid<fid_mr>> Fabric::register_memory(void* base, size_t bytes, uint64_t access) {
  const size_t key_bytes = std::clamp<size_t>(info_->domain_attr->mr_key_size, 1, 8);
  int result = 0;
  for (int n = 0; n < kKeyAttempts; ++n) {
    uint64_t key = 0;
    if (getrandom(&key, key_bytes, 0) != static_cast<ssize_t>(key_bytes)) {
      return Status(MK_ERROR_SYSTEM, "ofi: cannot get random bytes for a region's key");
    }
    fid_mr* made = nullptr;
    result = fi_mr_reg(domain_.get(), base, bytes, access, 0, key, 0, &made, nullptr);
    if (result == -FI_ENOKEY) continue;
    if (result != 0) break;
    Fid<fid_mr> memory(made);
    if ((info_->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
      result = fi_mr_bind(made, &endpoint_->fid, 0);
      if (result == 0) result = fi_mr_enable(made);
      if (result != 0) break;
    }
    if (fi_mr_key(made) == FI_KEY_NOTAVAIL) {
      return Status(MK_ERROR_UNSUPPORTED,
                    format("libfabric provider %s: its keys are longer than 8 bytes", provider()));
    }
    return memory;
  }
  return error("registering memory (fi_mr_reg)", result);
}

bool Fabric::may_sleep() {
  fid* waited = &queue_->fid;
  return fi_trywait(fabric_.get(), &waited, 1) == 0;
}

std::string Fabric::describe_completion_error(const fi_cq_err_entry& entry) const {
  char buffer[256] = "";
  const char* more = fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data, buffer, sizeof buffer);
  std::string text = describe(library_, entry.err);
  if (more != nullptr && *more != '\0' && text != more) text += format(" (%s)", more);
  return text;
}

}  // namespace mk::ofi
