import com.google.protobuf.Any;
import com.google.protobuf.Duration;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.shardring.common.v1.Backend;
import dev.shardring.common.v1.Endpoint;
import dev.shardring.common.v1.Error;
import dev.shardring.placement.v1.Placement;
import dev.shardring.placement.v1.PlacementConstraints;
import dev.shardring.placement.v1.PlacementServiceGrpc;
import dev.shardring.placement.v1.PlaceRequest;
import dev.shardring.placement.v1.Preview;
import dev.shardring.placement.v1.PreviewPlacementsRequest;
import dev.shardring.placement.v1.RankAssignment;
import dev.shardring.runner.v1.ChatMessage;
import dev.shardring.runner.v1.ChatMessages;
import dev.shardring.runner.v1.Completion;
import dev.shardring.runner.v1.GenerateRequest;
import dev.shardring.runner.v1.GenerateResponse;
import dev.shardring.runner.v1.GenerationInput;
import dev.shardring.runner.v1.Instance;
import dev.shardring.runner.v1.InstanceServiceGrpc;
import dev.shardring.runner.v1.InstanceState;
import dev.shardring.runner.v1.Sampling;
import dev.shardring.runner.v1.StartInstanceRequest;
import dev.shardring.runner.v1.StopInstanceRequest;
import dev.shardring.runner.v1.WatchInstanceRequest;
import dev.shardring.topology.v1.GetTopologyRequest;
import dev.shardring.topology.v1.Link;
import dev.shardring.topology.v1.Node;
import dev.shardring.topology.v1.Topology;
import dev.shardring.topology.v1.TopologyServiceGrpc;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.AbstractStub;
import io.grpc.stub.MetadataUtils;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;
import java.util.stream.Collectors;

/** A small Shardring client in Java. ../../docs/clients.md says what it takes and prints. */
public final class Client {
  private static final String USAGE =
      "usage: client COMMAND [ARGUMENT...] [--OPTION VALUE...]\n"
          + "  nodes, links                  [--topology HOST:PORT]\n"
          + "  preview MODEL, place MODEL    [--placement HOST:PORT --min-nodes N"
          + " --headroom-bytes N]\n"
          + "  start INSTANCE MODEL          the same; starts it on the head of the ring\n"
          + "  generate INSTANCE TEXT        --node HOST:PORT [--max-tokens N --seed N"
          + " --cancel-after N];\n"
          + "                                TEXT \"-\" is standard input\n"
          + "  stop INSTANCE                 --node HOST:PORT\n"
          + "  all                           [--timeout SECONDS --keepalive SECONDS"
          + " --traceparent TEXT]";
  private static final Map<String, Integer> ARGUMENT_COUNTS =
      Map.of(
          "nodes", 0, "links", 0, "preview", 1, "place", 1, "start", 2, "generate", 2, "stop", 1);
  private static final int MAX_MESSAGE_BYTES = 64 << 20;

  private final PrintStream out = utf8(FileDescriptor.out);
  private final PrintStream err = utf8(FileDescriptor.err);
  private final Map<String, String> texts = new HashMap<>();
  private final Map<String, Long> numbers = new HashMap<>();
  private final List<ManagedChannel> channels = new ArrayList<>();

  private Client() {
    texts.putAll(Map.of("topology", "127.0.0.1:52410", "placement", "127.0.0.1:52411"));
    texts.putAll(Map.of("node", "", "traceparent", ""));
    numbers.putAll(Map.of("min-nodes", 0L, "headroom-bytes", 0L, "max-tokens", 0L));
    numbers.putAll(Map.of("cancel-after", 0L, "timeout", 60L, "keepalive", 10L));
    numbers.put("seed", null); // Absent: chosen by the head.
  }

  public static void main(String[] arguments) throws IOException {
    System.exit(new Client().run(arguments));
  }

  private int run(String[] arguments) throws IOException {
    List<String> words = parse(arguments);
    if (words.isEmpty()
        || ARGUMENT_COUNTS.getOrDefault(words.get(0), -1) != words.size() - 1) {
      err.println(USAGE);
      return 2;
    }
    try {
      return command(words);
    } catch (StatusRuntimeException error) {
      report(error);
      return 1;
    } finally {
      out.flush();
      channels.forEach(ManagedChannel::shutdownNow);
    }
  }

  /** Fills the options and returns the other words; none when they make no sense. */
  private List<String> parse(String[] words) {
    List<String> positional = new ArrayList<>();
    for (int i = 0; i < words.length; i++) {
      if (!words[i].startsWith("--")) {
        positional.add(words[i]);
        continue;
      }
      String name = words[i].substring(2);
      String value = ++i < words.length ? words[i] : "";
      if (texts.containsKey(name)) {
        texts.put(name, value);
      } else if (numbers.containsKey(name) && value.matches("-?\\d{1,18}|-?[1-8]\\d{18}")) {
        numbers.put(name, Long.parseLong(value));
      } else {
        return List.of();
      }
    }
    return positional;
  }

  private int command(List<String> words) throws IOException {
    switch (words.get(0)) {
      case "nodes":
        return nodes();
      case "links":
        return links();
      case "preview":
        return preview(words.get(1));
      case "place":
        place(words.get(1), "");
        return 0;
      case "start":
        return start(words.get(1), words.get(2));
      case "generate":
        return generate(words.get(1), words.get(2));
      default:
        return stop(words.get(1));
    }
  }

  /** Returns a channel that connects with its first call, and is closed in the end. */
  private ManagedChannel connect(String address) {
    // A peer that does not answer a ping for ten seconds is gone. Java pings no more often than that.
    ManagedChannel channel =
        NettyChannelBuilder.forTarget(address)
            .usePlaintext()
            .proxyDetector(target -> null)
            .keepAliveTime(numbers.get("keepalive"), TimeUnit.SECONDS)
            .keepAliveTimeout(10, TimeUnit.SECONDS)
            .maxInboundMessageSize(MAX_MESSAGE_BYTES)
            .build();
    channels.add(channel);
    return channel;
  }

  /** Gives a stub's next call its deadline and the caller's trace. */
  private <T extends AbstractStub<T>> T prepared(T stub) {
    T timed = stub.withDeadlineAfter(numbers.get("timeout"), TimeUnit.SECONDS);
    if (texts.get("traceparent").isEmpty()) {
      return timed;
    }
    Metadata headers = new Metadata();
    headers.put(
        Metadata.Key.of("traceparent", Metadata.ASCII_STRING_MARSHALLER), texts.get("traceparent"));
    return timed.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(headers));
  }

  private Topology topology() {
    var stub = TopologyServiceGrpc.newBlockingStub(connect(texts.get("topology")));
    return prepared(stub).getTopology(GetTopologyRequest.getDefaultInstance()).getTopology();
  }

  private int nodes() {
    for (Node node : topology().getNodesList()) {
      out.printf(
          "node %s %s backends=%s memory_total_bytes=%d memory_available_bytes=%d name=%s%n",
          node.getNodeId(),
          address(node.getEndpointsList()),
          node.getBackendsValueList().stream()
              .map(number -> name(Backend.forNumber(number), number))
              .collect(Collectors.joining(",")),
          node.getMemoryTotalBytes(),
          node.getMemoryAvailableBytes(),
          node.getName());
    }
    return 0;
  }

  private int links() {
    for (Link link : topology().getLinksList()) {
      out.printf(
          "link %s %s %s kind=%s round_trip_us=%s%n",
          link.getSourceNodeId(),
          link.getSinkNodeId(),
          link.getSinkAddress(),
          name(link.getKind(), link.getKindValue()),
          link.hasRoundTrip() ? microseconds(link.getRoundTrip()) : "unknown");
    }
    return 0;
  }

  private PlacementConstraints constraints() {
    return PlacementConstraints.newBuilder()
        .setMinNodeCount(numbers.get("min-nodes").intValue())
        .setHeadroomBytes(numbers.get("headroom-bytes"))
        .build();
  }

  private int preview(String modelId) {
    var stub = PlacementServiceGrpc.newBlockingStub(connect(texts.get("placement")));
    var request =
        PreviewPlacementsRequest.newBuilder().setModelId(modelId).setConstraints(constraints());
    for (Preview one : prepared(stub).previewPlacements(request.build()).getPreviewsList()) {
      String outcome;
      if (one.hasRefusal()) {
        Error refusal = one.getRefusal();
        outcome = "refused " + refusal.getReason() + ": " + refusal.getMessage();
      } else {
        outcome =
            one.getPlacement().getRanksList().stream()
                .map(rank -> rank.getNodeName() + ":" + layers(rank))
                .collect(Collectors.joining(" "));
      }
      out.printf(
          "preview nodes=%d %s %s %s%n",
          one.getNodeCount(),
          name(one.getSharding(), one.getShardingValue()),
          name(one.getRingBackend(), one.getRingBackendValue()),
          outcome);
    }
    return 0;
  }

  private Placement place(String modelId, String instanceId) {
    var stub = PlacementServiceGrpc.newBlockingStub(connect(texts.get("placement")));
    var request =
        PlaceRequest.newBuilder()
            .setModelId(modelId)
            .setConstraints(constraints())
            .setRequestId(instanceId);
    Placement placed = prepared(stub).place(request.build()).getPlacement();
    out.printf(
        "placement %s commit=%s layer_count=%d%n",
        placed.getModelId(), placed.getCommit(), placed.getLayerCount());
    for (RankAssignment rank : placed.getRanksList()) {
      out.printf(
          "rank %d %s %s layers=%s weight_bytes=%d name=%s%n",
          rank.getRank(),
          rank.getNodeId(),
          address(rank.getEndpointsList()),
          layers(rank),
          rank.getWeightBytes(),
          rank.getNodeName());
    }
    return placed;
  }

  private int start(String instanceId, String modelId) {
    Placement placed = place(modelId, instanceId);
    String head = address(placed.getRanks(0).getEndpointsList());
    var stub = InstanceServiceGrpc.newBlockingStub(connect(head));
    prepared(stub)
        .startInstance(
            StartInstanceRequest.newBuilder()
                .setInstanceId(instanceId)
                .setPlacement(placed)
                .build());
    var last = new Object() {
      Instance instance = null;
    };
    var request = WatchInstanceRequest.newBuilder().setInstanceId(instanceId).build();
    boolean ready =
        read(
            () -> prepared(stub).watchInstance(request),
            message -> {
              Instance now = message.getInstance();
              if (last.instance == null || last.instance.getStateValue() != now.getStateValue()) {
                out.printf(
                    "instance %s %s%n", instanceId, name(now.getState(), now.getStateValue()));
                out.flush();
              }
              last.instance = now;
              return now.getState() == InstanceState.INSTANCE_STATE_READY;
            });
    if (ready) {
      out.printf("head %s%n", head);
    } else if (last.instance != null && last.instance.hasError()) {
      Error error = last.instance.getError();
      printError(error.getCode(), error.getReason(), error.getMessage(), error.getMetadataMap());
    }
    return ready ? 0 : 1;
  }

  private int generate(String instanceId, String text) throws IOException {
    if (text.equals("-")) {
      text = new String(System.in.readAllBytes(), StandardCharsets.UTF_8);
    }
    ChatMessage turn = ChatMessage.newBuilder().setRole("user").setContent(text).build();
    Sampling.Builder sampling = Sampling.newBuilder();
    if (numbers.get("seed") != null) {
      sampling.setSeed(numbers.get("seed"));
    }
    GenerateRequest request =
        GenerateRequest.newBuilder()
            .setInstanceId(instanceId)
            .setInput(
                GenerationInput.newBuilder()
                    .setMessages(ChatMessages.newBuilder().addMessages(turn)))
            .setMaxTokenCount(numbers.get("max-tokens").intValue())
            .setSampling(sampling)
            .build();
    var stub = InstanceServiceGrpc.newBlockingStub(connect(texts.get("node")));
    List<GenerateResponse> completions = new ArrayList<>();
    long limit = numbers.get("cancel-after");
    long[] count = {0};
    boolean cancelled =
        read(
            () -> prepared(stub).generate(request),
            part -> {
              out.print(part.getText());
              out.flush();
              if (part.hasCompletion()) {
                completions.add(part);
              }
              return ++count[0] == limit;
            });
    out.println();
    for (GenerateResponse part : completions) {
      Completion figures = part.getCompletion();
      out.printf(
          "completion %d %s prompt_token_count=%d completion_token_count=%d%n",
          part.getChoiceIndex(),
          name(figures.getFinishReason(), figures.getFinishReasonValue()),
          figures.getPromptTokenCount(),
          figures.getCompletionTokenCount());
    }
    if (cancelled) {
      out.printf("cancelled after %d messages%n", count[0]);
    }
    return 0;
  }

  private int stop(String instanceId) {
    var stub = InstanceServiceGrpc.newBlockingStub(connect(texts.get("node")));
    var request = StopInstanceRequest.newBuilder().setInstanceId(instanceId).build();
    Instance instance = prepared(stub).stopInstance(request).getInstance();
    out.printf(
        "instance %s %s%n", instanceId, name(instance.getState(), instance.getStateValue()));
    return 0;
  }

  /** Gives each message to `take`; once that returns true, cancels the call and returns true. */
  private static <T> boolean read(Callable<Iterator<T>> call, Predicate<T> take) {
    Context.CancellableContext context = Context.current().withCancellation();
    try {
      Iterator<T> messages = context.call(call);
      while (messages.hasNext()) {
        if (take.test(messages.next())) {
          context.cancel(null);
          waitUntilEnded(messages);
          return true;
        }
      }
      return false;
    } catch (RuntimeException error) {
      throw error;
    } catch (Exception error) {
      throw new IllegalStateException(error);
    } finally {
      context.cancel(null);
    }
  }

  /** Returns once a cancelled call is over, so that the server was told of it. */
  private static void waitUntilEnded(Iterator<?> messages) {
    try {
      while (messages.hasNext()) {
        messages.next();
      }
    } catch (StatusRuntimeException error) {
      if (error.getStatus().getCode() != Status.Code.CANCELLED) {
        throw error;
      }
    }
  }

  private static String address(List<Endpoint> endpoints) {
    if (endpoints.isEmpty()) {
      return ":0";
    }
    String host = endpoints.get(0).getAddress();
    return (host.contains(":") ? "[" + host + "]" : host) + ":" + endpoints.get(0).getPort();
  }

  private static String layers(RankAssignment rank) {
    return rank.getLayers().getStart() + "-" + rank.getLayers().getEnd();
  }

  /** Returns an enum value's name; one that this program does not know yet is its number. */
  private static String name(Enum<?> value, int number) {
    boolean known = value != null && !value.name().equals("UNRECOGNIZED");
    return known ? value.name() : Integer.toString(number);
  }

  private static long microseconds(Duration duration) {
    return duration.getSeconds() * 1_000_000 + duration.getNanos() / 1_000;
  }

  /** Prints a failed call's status, with the ErrorInfo and RetryInfo in its details. */
  private void report(StatusRuntimeException error) {
    ErrorInfo info = ErrorInfo.getDefaultInstance();
    RetryInfo retry = null;
    com.google.rpc.Status status = StatusProto.fromThrowable(error);
    try {
      for (Any detail : status.getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          info = detail.unpack(ErrorInfo.class);
        } else if (detail.is(RetryInfo.class)) {
          retry = detail.unpack(RetryInfo.class);
        }
      }
    } catch (InvalidProtocolBufferException malformed) {
      err.println("  malformed details: " + malformed.getMessage());
    }
    // Why a connection failed stands in the cause only.
    String why = error.getCause() == null ? "" : ": " + error.getCause().getMessage();
    printError(
        status.getCode(), info.getReason(), status.getMessage() + why, info.getMetadataMap());
    if (retry != null) {
      err.printf("  retry after %d ms%n", microseconds(retry.getRetryDelay()) / 1_000);
    }
  }

  private void printError(int code, String reason, String message, Map<String, String> figures) {
    String name = Status.fromCodeValue(code).getCode().name();
    err.printf("error %s%s: %s%n", name, reason.isEmpty() ? "" : " " + reason, message);
    new TreeMap<>(figures).forEach((key, value) -> err.printf("  %s=%s%n", key, value));
  }

  private static PrintStream utf8(FileDescriptor descriptor) {
    return new PrintStream(new FileOutputStream(descriptor), false, StandardCharsets.UTF_8);
  }
}
