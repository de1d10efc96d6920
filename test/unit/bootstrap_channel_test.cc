// SPDX-License-Identifier: MIT
#include "lib/bootstrap_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include "../support/catch.h"
#include "lib/deadline.h"

using namespace mk;
using std::chrono::milliseconds;

namespace {

// Two ends of one TCP connection, both open.
struct Pair {
  Channel client, server;
  int server_fd;  // owned by `server`
};

Pair connect_pair() {
  SocketAddress address;
  address.family = 4;
  address.bytes = {127, 0, 0, 1};
  auto listener = listen_on(address);
  REQUIRE(listener.ok());
  auto connecting = start_connect(address);
  REQUIRE(connecting.ok());
  pollfd waiting{listener.value().get(), POLLIN, 0};
  REQUIRE(poll(&waiting, 1, 10000) == 1);
  bool exhausted = false;
  FileDescriptor accepted = accept_connection(listener.value().get(), &exhausted);
  REQUIRE(accepted.valid());
  const int server_fd = accepted.get();
  const Secret secret{};
  Hello hello;
  hello.purpose = Purpose::root;
  Pair pair{Channel::client(std::move(connecting.value()), secret, hello),
            Channel::server(std::move(accepted), secret, Purpose::root, 0, std::nullopt), server_fd};
  const Deadline limit = Deadline::after(milliseconds(10000));
  while (!(pair.client.open() && pair.server.open()) && !limit.passed()) {
    pair.client.pump();
    pair.server.pump();
  }
  REQUIRE(pair.client.open());
  REQUIRE(pair.server.open());
  return pair;
}

Channel::End end_of(Channel& channel) {
  const Deadline limit = Deadline::after(milliseconds(10000));
  while (channel.end() == Channel::End::none && !limit.passed()) {
    channel.pump();
    while (channel.next()) continue;
  }
  return channel.end();
}

// The operating system has told `fd` of an error or an end.
void await_hang_up(int fd) {
  pollfd waiting{fd, POLLIN, 0};
  REQUIRE(poll(&waiting, 1, 10000) == 1);
}

}  // namespace

TEST_CASE("an end in order is one, also to who writes") {
  Pair pair = connect_pair();
  pair.server.close();
  await_hang_up(pair.client.fd());
  const bool writes = GENERATE(false, true);
  for (int frame = 0; writes && frame < 2; ++frame) {
    pair.client.send(FrameKind::heartbeat);
    pair.client.flush();
  }
  CHECK(end_of(pair.client) == Channel::End::closed);
  CHECK_FALSE(pair.client.cut_off());
}

TEST_CASE("an error is none the less one when a write meets it first") {
  Pair pair = connect_pair();
  // Closing resets.
  const linger at_once{1, 0};
  REQUIRE(setsockopt(pair.server_fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
  pair.server.close();
  await_hang_up(pair.client.fd());
  const bool writes = GENERATE(false, true);
  if (writes) {
    pair.client.send(FrameKind::heartbeat);
    pair.client.flush();
    CHECK(pair.client.write_failed());
  }
  CHECK(end_of(pair.client) == Channel::End::lost);
  CHECK(pair.client.why() == "Connection reset by peer");
}

TEST_CASE("what arrived before an error is read, though a write met the error") {
  Pair pair = connect_pair();
  pair.server.send(FrameKind::bye);
  pair.server.flush();
  await_hang_up(pair.client.fd());
  const linger at_once{1, 0};
  REQUIRE(setsockopt(pair.server_fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
  pair.server.close();
  const Deadline limit = Deadline::after(milliseconds(10000));
  while (!pair.client.write_failed() && !limit.passed()) {
    pair.client.send(FrameKind::heartbeat);
    pair.client.flush();
  }
  REQUIRE(pair.client.write_failed());
  pair.client.pump();
  const auto frame = pair.client.next();
  REQUIRE(frame);
  CHECK(frame->kind == FrameKind::bye);
  CHECK(end_of(pair.client) == Channel::End::lost);
}
