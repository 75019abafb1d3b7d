// A small Shardring client in C++. ../../docs/clients.md says what it takes and prints.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "shardring/placement/v1/placement_service.grpc.pb.h"
#include "shardring/runner/v1/instance_service.grpc.pb.h"
#include "shardring/topology/v1/topology_service.grpc.pb.h"

namespace common = shardring::common::v1;
namespace placement = shardring::placement::v1;
namespace runner = shardring::runner::v1;
namespace topology = shardring::topology::v1;

namespace {

const char kUsage[] =
    R"(usage: client COMMAND [ARGUMENT...] [--OPTION VALUE...]
  nodes, links                  [--topology HOST:PORT]
  preview MODEL, place MODEL    [--placement HOST:PORT --min-nodes N --headroom-bytes N]
  start INSTANCE MODEL          the same; starts it on the head of the ring
  generate INSTANCE TEXT        --node HOST:PORT [--max-tokens N --seed N --cancel-after N];
                                TEXT "-" is standard input
  stop INSTANCE                 --node HOST:PORT
  all                           [--timeout SECONDS --keepalive SECONDS --traceparent TEXT]
)";

// gRPC's own names of its codes, by number.
const char* const kCodes[] = {
    "OK",           "CANCELLED",           "UNKNOWN",           "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED", "NOT_FOUND",      "ALREADY_EXISTS",    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",     "OUT_OF_RANGE",
    "UNIMPLEMENTED", "INTERNAL",           "UNAVAILABLE",       "DATA_LOSS",
    "UNAUTHENTICATED"};

const std::map<std::string, size_t> kArgumentCounts = {
    {"nodes", 0}, {"links", 0}, {"preview", 1}, {"place", 1},
    {"start", 2}, {"generate", 2}, {"stop", 1}};

std::map<std::string, std::string> texts = {{"topology", "127.0.0.1:52410"},
                                            {"placement", "127.0.0.1:52411"},
                                            {"node", ""},
                                            {"traceparent", ""}};
std::map<std::string, int64_t> numbers = {
    {"min-nodes", 0},    {"headroom-bytes", 0}, {"max-tokens", 0},
    {"cancel-after", 0}, {"timeout", 60},       {"keepalive", 10}};
// Absent: chosen by the head.
std::unique_ptr<int64_t> seed;

// Thrown when a call failed; `main` prints it.
struct Failed {
  grpc::Status status;
};

void Check(const grpc::Status& status) {
  if (!status.ok()) throw Failed{status};
}

// Returns a channel that connects with its first call.
std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  // A peer that does not answer a ping for ten seconds is gone.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, static_cast<int>(numbers["keepalive"]) * 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt("grpc.http2.ping_timeout_ms", 10000);  // Its name in later versions.
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// Gives a call its deadline and the caller's trace.
void Prepare(grpc::ClientContext* context) {
  context->set_deadline(std::chrono::system_clock::now() +
                        std::chrono::seconds(numbers["timeout"]));
  if (!texts["traceparent"].empty()) context->AddMetadata("traceparent", texts["traceparent"]);
}

// Returns an enum value's name; one that this program does not know yet is its number.
std::string Name(const google::protobuf::EnumDescriptor* type, int number) {
  const auto* value = type->FindValueByNumber(number);
  return value ? value->name() : std::to_string(number);
}

template <typename Endpoints>
std::string Address(const Endpoints& endpoints) {
  if (endpoints.empty()) return ":0";
  const std::string& host = endpoints[0].address();
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return (is_ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(endpoints[0].port());
}

int64_t Microseconds(const google::protobuf::Duration& duration) {
  return duration.seconds() * 1000000 + duration.nanos() / 1000;
}

std::string Layers(const placement::RankAssignment& rank) {
  return std::to_string(rank.layers().start()) + "-" + std::to_string(rank.layers().end());
}

topology::Topology GetTopology() {
  auto stub = topology::TopologyService::NewStub(Connect(texts["topology"]));
  grpc::ClientContext context;
  Prepare(&context);
  topology::GetTopologyResponse response;
  Check(stub->GetTopology(&context, topology::GetTopologyRequest(), &response));
  return response.topology();
}

int Nodes() {
  const auto known = GetTopology();
  for (const auto& node : known.nodes()) {
    std::string backends;
    for (int backend : node.backends()) {
      backends += (backends.empty() ? "" : ",") + Name(common::Backend_descriptor(), backend);
    }
    std::cout << "node " << node.node_id() << " " << Address(node.endpoints())
              << " backends=" << backends << " memory_total_bytes=" << node.memory_total_bytes()
              << " memory_available_bytes=" << node.memory_available_bytes()
              << " name=" << node.name() << "\n";
  }
  return 0;
}

int Links() {
  const auto known = GetTopology();
  for (const auto& link : known.links()) {
    std::cout << "link " << link.source_node_id() << " " << link.sink_node_id() << " "
              << link.sink_address()
              << " kind=" << Name(topology::InterfaceKind_descriptor(), link.kind())
              << " round_trip_us="
              << (link.has_round_trip() ? std::to_string(Microseconds(link.round_trip()))
                                        : "unknown")
              << "\n";
  }
  return 0;
}

template <typename Request>
Request Wanted(const std::string& model_id) {
  Request request;
  request.set_model_id(model_id);
  request.mutable_constraints()->set_min_node_count(static_cast<int32_t>(numbers["min-nodes"]));
  request.mutable_constraints()->set_headroom_bytes(numbers["headroom-bytes"]);
  return request;
}

int Preview(const std::string& model_id) {
  auto stub = placement::PlacementService::NewStub(Connect(texts["placement"]));
  grpc::ClientContext context;
  Prepare(&context);
  placement::PreviewPlacementsResponse response;
  Check(stub->PreviewPlacements(
      &context, Wanted<placement::PreviewPlacementsRequest>(model_id), &response));
  for (const auto& one : response.previews()) {
    std::string outcome;
    if (one.has_refusal()) {
      outcome = " refused " + one.refusal().reason() + ": " + one.refusal().message();
    }
    for (const auto& rank : one.placement().ranks()) {
      outcome += " " + rank.node_name() + ":" + Layers(rank);
    }
    std::cout << "preview nodes=" << one.node_count() << " "
              << Name(common::Sharding_descriptor(), one.sharding()) << " "
              << Name(common::RingBackend_descriptor(), one.ring_backend()) << outcome << "\n";
  }
  return 0;
}

placement::Placement Place(const std::string& model_id, const std::string& instance_id) {
  auto stub = placement::PlacementService::NewStub(Connect(texts["placement"]));
  grpc::ClientContext context;
  Prepare(&context);
  auto request = Wanted<placement::PlaceRequest>(model_id);
  request.set_request_id(instance_id);
  placement::PlaceResponse response;
  Check(stub->Place(&context, request, &response));
  const auto& placed = response.placement();
  std::cout << "placement " << placed.model_id() << " commit=" << placed.commit()
            << " layer_count=" << placed.layer_count() << "\n";
  for (const auto& rank : placed.ranks()) {
    std::cout << "rank " << rank.rank() << " " << rank.node_id() << " "
              << Address(rank.endpoints()) << " layers=" << Layers(rank)
              << " weight_bytes=" << rank.weight_bytes() << " name=" << rank.node_name() << "\n";
  }
  return placed;
}

// Gives each message to `take`; once that returns true, cancels the call and returns true.
template <typename Message>
bool Read(grpc::ClientContext* context, grpc::ClientReader<Message>* reader,
          const std::function<bool(const Message&)>& take) {
  Message message;
  bool enough = false;
  while (reader->Read(&message)) {
    if (enough) continue;
    enough = take(message);
    if (enough) context->TryCancel();
  }
  const grpc::Status status = reader->Finish();
  if (!enough || status.error_code() != grpc::StatusCode::CANCELLED) Check(status);
  return enough;
}

void PrintError(int code, const std::string& reason, const std::string& message,
                const std::map<std::string, std::string>& figures) {
  const bool is_known = 0 <= code && code < static_cast<int>(std::size(kCodes));
  std::cerr << "error " << (is_known ? kCodes[code] : std::to_string(code))
            << (reason.empty() ? "" : " " + reason) << ": " << message << "\n";
  for (const auto& [key, value] : figures) std::cerr << "  " << key << "=" << value << "\n";
}

int Start(const std::string& instance_id, const std::string& model_id) {
  const auto placed = Place(model_id, instance_id);
  const std::string head = Address(placed.ranks(0).endpoints());
  auto stub = runner::InstanceService::NewStub(Connect(head));
  {
    grpc::ClientContext context;
    Prepare(&context);
    runner::StartInstanceRequest request;
    request.set_instance_id(instance_id);
    *request.mutable_placement() = placed;
    runner::StartInstanceResponse response;
    Check(stub->StartInstance(&context, request, &response));
  }
  grpc::ClientContext context;
  Prepare(&context);
  runner::WatchInstanceRequest request;
  request.set_instance_id(instance_id);
  int state = -1;
  common::Error fault;
  auto reader = stub->WatchInstance(&context, request);
  const bool ready = Read<runner::WatchInstanceResponse>(
      &context, reader.get(), [&](const runner::WatchInstanceResponse& message) {
        const auto& instance = message.instance();
        if (instance.state() != state) {
          std::cout << "instance " << instance_id << " "
                    << Name(runner::InstanceState_descriptor(), instance.state()) << std::endl;
        }
        state = instance.state();
        fault = instance.error();
        return state == runner::INSTANCE_STATE_READY;
      });
  if (ready) std::cout << "head " << head << "\n";
  if (!fault.reason().empty()) {
    PrintError(fault.code(), fault.reason(), fault.message(),
               {fault.metadata().begin(), fault.metadata().end()});
  }
  return ready ? 0 : 1;
}

int Generate(const std::string& instance_id, std::string text) {
  if (text == "-") {
    text.assign(std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>());
  }
  runner::GenerateRequest request;
  request.set_instance_id(instance_id);
  auto* turn = request.mutable_input()->mutable_messages()->add_messages();
  turn->set_role("user");
  turn->set_content(text);
  request.set_max_token_count(static_cast<int32_t>(numbers["max-tokens"]));
  if (seed) request.mutable_sampling()->set_seed(*seed);

  auto stub = runner::InstanceService::NewStub(Connect(texts["node"]));
  grpc::ClientContext context;
  Prepare(&context);
  auto reader = stub->Generate(&context, request);
  std::vector<runner::GenerateResponse> completions;
  int64_t count = 0;
  const bool cancelled = Read<runner::GenerateResponse>(
      &context, reader.get(), [&](const runner::GenerateResponse& part) {
        std::cout << part.text() << std::flush;
        if (part.has_completion()) completions.push_back(part);
        return ++count == numbers["cancel-after"];
      });
  std::cout << "\n";
  for (const auto& part : completions) {
    const auto& figures = part.completion();
    std::cout << "completion " << part.choice_index() << " "
              << Name(runner::FinishReason_descriptor(), figures.finish_reason())
              << " prompt_token_count=" << figures.prompt_token_count()
              << " completion_token_count=" << figures.completion_token_count() << "\n";
  }
  if (cancelled) std::cout << "cancelled after " << count << " messages\n";
  return 0;
}

int Stop(const std::string& instance_id) {
  auto stub = runner::InstanceService::NewStub(Connect(texts["node"]));
  grpc::ClientContext context;
  Prepare(&context);
  runner::StopInstanceRequest request;
  request.set_instance_id(instance_id);
  runner::StopInstanceResponse response;
  Check(stub->StopInstance(&context, request, &response));
  std::cout << "instance " << instance_id << " "
            << Name(runner::InstanceState_descriptor(), response.instance().state()) << "\n";
  return 0;
}

// Prints a failed call's status, with the google.rpc.ErrorInfo and RetryInfo in its details.
void Report(const grpc::Status& failed) {
  google::rpc::Status status;
  google::rpc::ErrorInfo info;
  google::rpc::RetryInfo retry;
  if (status.ParseFromString(failed.error_details())) {
    for (const auto& detail : status.details()) {
      if (detail.Is<google::rpc::ErrorInfo>()) detail.UnpackTo(&info);
      if (detail.Is<google::rpc::RetryInfo>()) detail.UnpackTo(&retry);
    }
  }
  PrintError(failed.error_code(), info.reason(), failed.error_message(),
             {info.metadata().begin(), info.metadata().end()});
  if (retry.has_retry_delay()) {
    std::cerr << "  retry after " << Microseconds(retry.retry_delay()) / 1000 << " ms\n";
  }
}

// Fills the options and returns the other words; none when they make no sense.
std::vector<std::string> Parse(int count, char** words) {
  std::vector<std::string> positional;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word.rfind("--", 0) != 0) {
      positional.push_back(word);
      continue;
    }
    const std::string name = word.substr(2);
    if (++i == count) return {};
    if (texts.count(name)) {
      texts[name] = words[i];
      continue;
    }
    if (!numbers.count(name) && name != "seed") return {};
    try {
      size_t end = 0;
      const int64_t value = std::stoll(words[i], &end);
      if (words[i][end] != '\0') return {};
      if (name == "seed") {
        seed = std::make_unique<int64_t>(value);
      } else {
        numbers[name] = value;
      }
    } catch (const std::logic_error&) {  // Not a number, or of more than 64 bits.
      return {};
    }
  }
  return positional;
}

int Run(const std::vector<std::string>& words) {
  const std::string& command = words[0];
  if (command == "nodes") return Nodes();
  if (command == "links") return Links();
  if (command == "preview") return Preview(words[1]);
  if (command == "place") return Place(words[1], ""), 0;
  if (command == "start") return Start(words[1], words[2]);
  if (command == "generate") return Generate(words[1], words[2]);
  return Stop(words[1]);
}

}  // namespace

int main(int count, char** arguments) {
  const auto words = Parse(count, arguments);
  const auto known = words.empty() ? kArgumentCounts.end() : kArgumentCounts.find(words[0]);
  if (known == kArgumentCounts.end() || known->second != words.size() - 1) {
    std::cerr << kUsage;
    return 2;
  }
  try {
    return Run(words);
  } catch (const Failed& failed) {
    std::cout.flush();
    Report(failed.status);
    return 1;
  }
}
