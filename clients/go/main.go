// A small Shardring client in Go. ../../docs/clients.md says what it takes and prints.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	commonv1 "shardring.dev/gen/go/shardring/common/v1"
	placementv1 "shardring.dev/gen/go/shardring/placement/v1"
	runnerv1 "shardring.dev/gen/go/shardring/runner/v1"
	topologyv1 "shardring.dev/gen/go/shardring/topology/v1"
)

const usage = `usage: client COMMAND [ARGUMENT...] [--OPTION VALUE...]
  nodes, links                  [--topology HOST:PORT]
  preview MODEL, place MODEL    [--placement HOST:PORT --min-nodes N --headroom-bytes N]
  start INSTANCE MODEL          the same; starts it on the head of the ring
  generate INSTANCE TEXT        --node HOST:PORT [--max-tokens N --seed N --cancel-after N];
                                TEXT "-" is standard input
  stop INSTANCE                 --node HOST:PORT
  all                           [--timeout SECONDS --keepalive SECONDS --traceparent TEXT]
`

// gRPC's own names of its codes, by number.
var codeNames = []string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
	"ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
	"OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// client holds what the command line said.
type client struct {
	texts   map[string]string
	numbers map[string]int64
	seed    *int64
}

// command is what one word does, and how many arguments it takes.
type command struct {
	argumentCount int
	run           func(c *client, arguments []string) error
}

// fault is an error that the API holds as data, such as why an instance failed.
type fault struct{ data *commonv1.Error }

func (f fault) Error() string { return f.data.GetMessage() }

var commands = map[string]command{
	"nodes":    {0, (*client).nodes},
	"links":    {0, (*client).links},
	"preview":  {1, (*client).preview},
	"place":    {1, func(c *client, words []string) error { _, err := c.place(words[0], ""); return err }},
	"start":    {2, (*client).start},
	"generate": {2, (*client).generate},
	"stop":     {1, (*client).stop},
}

func main() {
	c := &client{
		texts: map[string]string{
			"topology": "127.0.0.1:52410", "placement": "127.0.0.1:52411", "node": "",
			"traceparent": "",
		},
		numbers: map[string]int64{
			"min-nodes": 0, "headroom-bytes": 0, "max-tokens": 0, "seed": 0, "cancel-after": 0,
			"timeout": 60, "keepalive": 10,
		},
	}
	words, ok := c.parse(os.Args[1:])
	if !ok {
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
	if err := commands[words[0]].run(c, words[1:]); err != nil {
		report(err)
		os.Exit(1)
	}
}

// parse fills the options and returns the other words; false when they make no sense.
func (c *client) parse(words []string) ([]string, bool) {
	var positional []string
	for i := 0; i < len(words); i++ {
		if !strings.HasPrefix(words[i], "--") {
			positional = append(positional, words[i])
			continue
		}
		name := words[i][2:]
		if i++; i == len(words) {
			return nil, false
		}
		if _, isText := c.texts[name]; isText {
			c.texts[name] = words[i]
			continue
		}
		number, err := strconv.ParseInt(words[i], 10, 64)
		if _, known := c.numbers[name]; !known || err != nil {
			return nil, false
		}
		c.numbers[name] = number
		if name == "seed" {
			c.seed = &number
		}
	}
	if len(positional) == 0 {
		return nil, false
	}
	known, ok := commands[positional[0]]
	return positional, ok && known.argumentCount == len(positional)-1
}

// dial returns a channel that connects with its first call.
func (c *client) dial(address string) (*grpc.ClientConn, error) {
	// A peer that does not answer a ping for ten seconds is gone. Go pings no more often than that.
	alive := keepalive.ClientParameters{
		Time: time.Duration(c.numbers["keepalive"]) * time.Second, Timeout: 10 * time.Second}
	return grpc.Dial(
		address,
		grpc.WithInsecure(),
		grpc.WithNoProxy(),
		grpc.WithKeepaliveParams(alive),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
	)
}

// context returns what a call is made in: its deadline, and the caller's trace.
func (c *client) context() (context.Context, context.CancelFunc) {
	seconds := time.Duration(c.numbers["timeout"]) * time.Second
	ctx, cancel := context.WithTimeout(context.Background(), seconds)
	if trace := c.texts["traceparent"]; trace != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "traceparent", trace)
	}
	return ctx, cancel
}

func (c *client) topology() (*topologyv1.Topology, error) {
	channel, err := c.dial(c.texts["topology"])
	if err != nil {
		return nil, err
	}
	defer channel.Close()
	ctx, cancel := c.context()
	defer cancel()
	stub := topologyv1.NewTopologyServiceClient(channel)
	response, err := stub.GetTopology(ctx, &topologyv1.GetTopologyRequest{})
	return response.GetTopology(), err
}

func (c *client) nodes([]string) error {
	topology, err := c.topology()
	for _, node := range topology.GetNodes() {
		backends := make([]string, len(node.Backends))
		for i, backend := range node.Backends {
			// A value that this program does not know yet is its number.
			backends[i] = backend.String()
		}
		fmt.Printf("node %s %s backends=%s memory_total_bytes=%d memory_available_bytes=%d name=%s\n",
			node.NodeId, address(node.Endpoints), strings.Join(backends, ","),
			node.MemoryTotalBytes, node.MemoryAvailableBytes, node.Name)
	}
	return err
}

func (c *client) links([]string) error {
	topology, err := c.topology()
	for _, link := range topology.GetLinks() {
		roundTrip := "unknown"
		if link.RoundTrip != nil {
			roundTrip = strconv.FormatInt(link.RoundTrip.AsDuration().Microseconds(), 10)
		}
		fmt.Printf("link %s %s %s kind=%s round_trip_us=%s\n",
			link.SourceNodeId, link.SinkNodeId, link.SinkAddress, link.Kind, roundTrip)
	}
	return err
}

func (c *client) constraints() *placementv1.PlacementConstraints {
	return &placementv1.PlacementConstraints{
		MinNodeCount:  int32(c.numbers["min-nodes"]),
		HeadroomBytes: c.numbers["headroom-bytes"],
	}
}

func (c *client) preview(words []string) error {
	channel, err := c.dial(c.texts["placement"])
	if err != nil {
		return err
	}
	defer channel.Close()
	ctx, cancel := c.context()
	defer cancel()
	response, err := placementv1.NewPlacementServiceClient(channel).PreviewPlacements(
		ctx, &placementv1.PreviewPlacementsRequest{ModelId: words[0], Constraints: c.constraints()})
	for _, one := range response.GetPreviews() {
		outcome := ""
		if refusal := one.GetRefusal(); refusal != nil {
			outcome = fmt.Sprintf("refused %s: %s", refusal.Reason, refusal.Message)
		} else {
			var parts []string
			for _, rank := range one.GetPlacement().GetRanks() {
				parts = append(parts, rank.NodeName+":"+layers(rank))
			}
			outcome = strings.Join(parts, " ")
		}
		fmt.Printf("preview nodes=%d %s %s %s\n", one.NodeCount, one.Sharding, one.RingBackend, outcome)
	}
	return err
}

func (c *client) place(modelID, instanceID string) (*placementv1.Placement, error) {
	channel, err := c.dial(c.texts["placement"])
	if err != nil {
		return nil, err
	}
	defer channel.Close()
	ctx, cancel := c.context()
	defer cancel()
	response, err := placementv1.NewPlacementServiceClient(channel).Place(
		ctx, &placementv1.PlaceRequest{
			ModelId: modelID, Constraints: c.constraints(), RequestId: instanceID})
	if err != nil {
		return nil, err
	}
	placed := response.Placement
	fmt.Printf("placement %s commit=%s layer_count=%d\n",
		placed.ModelId, placed.Commit, placed.LayerCount)
	for _, rank := range placed.Ranks {
		fmt.Printf("rank %d %s %s layers=%s weight_bytes=%d name=%s\n",
			rank.Rank, rank.NodeId, address(rank.Endpoints), layers(rank), rank.WeightBytes,
			rank.NodeName)
	}
	return placed, nil
}

func (c *client) start(words []string) error {
	instanceID := words[0]
	placed, err := c.place(words[1], instanceID)
	if err != nil {
		return err
	}
	head := address(placed.Ranks[0].Endpoints)
	channel, err := c.dial(head)
	if err != nil {
		return err
	}
	defer channel.Close()
	stub := runnerv1.NewInstanceServiceClient(channel)
	ctx, cancel := c.context()
	defer cancel()
	_, err = stub.StartInstance(
		ctx, &runnerv1.StartInstanceRequest{InstanceId: instanceID, Placement: placed})
	if err != nil {
		return err
	}
	// Cancelled by the return, whatever the watch still has to say.
	ctx, cancel = c.context()
	defer cancel()
	watch, err := stub.WatchInstance(ctx, &runnerv1.WatchInstanceRequest{InstanceId: instanceID})
	if err != nil {
		return err
	}
	state := runnerv1.InstanceState(-1)
	var ended error = fault{&commonv1.Error{
		Code: int32(codes.Unavailable), Message: "The instance ended before it was ready."}}
	for {
		message, err := watch.Recv()
		if err == io.EOF {
			return ended
		}
		if err != nil {
			return err
		}
		instance := message.GetInstance()
		if instance.GetState() != state {
			fmt.Printf("instance %s %s\n", instanceID, instance.GetState())
		}
		state = instance.GetState()
		if state == runnerv1.InstanceState_INSTANCE_STATE_READY {
			fmt.Printf("head %s\n", head)
			return nil
		}
		if instance.GetError() != nil {
			ended = fault{instance.Error}
		}
	}
}

func (c *client) generate(words []string) error {
	text := words[1]
	if text == "-" {
		read, err := io.ReadAll(os.Stdin)
		if err != nil {
			return err
		}
		text = string(read)
	}
	turns := &runnerv1.ChatMessages{
		Messages: []*runnerv1.ChatMessage{{Role: "user", Content: text}}}
	channel, err := c.dial(c.texts["node"])
	if err != nil {
		return err
	}
	defer channel.Close()
	ctx, cancel := c.context()
	defer cancel()
	stream, err := runnerv1.NewInstanceServiceClient(channel).Generate(
		ctx, &runnerv1.GenerateRequest{
			InstanceId:    words[0],
			Input:         &runnerv1.GenerationInput{Input: &runnerv1.GenerationInput_Messages{Messages: turns}},
			MaxTokenCount: int32(c.numbers["max-tokens"]),
			Sampling:      &runnerv1.Sampling{Seed: c.seed},
		})
	if err != nil {
		return err
	}
	var completions []*runnerv1.GenerateResponse
	count, limit := int64(0), c.numbers["cancel-after"]
	for {
		part, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		fmt.Print(part.Text)
		if part.Completion != nil {
			completions = append(completions, part)
		}
		if count++; count == limit {
			cancel()
			break
		}
	}
	fmt.Println()
	for _, part := range completions {
		figures := part.Completion
		fmt.Printf("completion %d %s prompt_token_count=%d completion_token_count=%d\n",
			part.ChoiceIndex, figures.FinishReason, figures.PromptTokenCount,
			figures.CompletionTokenCount)
	}
	if limit > 0 && count == limit {
		fmt.Printf("cancelled after %d messages\n", count)
		return waitUntilEnded(stream)
	}
	return nil
}

// waitUntilEnded returns once a cancelled call is over, so that the server was told of it.
func waitUntilEnded(stream runnerv1.InstanceService_GenerateClient) error {
	for {
		_, err := stream.Recv()
		if err == io.EOF || status.Code(err) == codes.Canceled {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (c *client) stop(words []string) error {
	channel, err := c.dial(c.texts["node"])
	if err != nil {
		return err
	}
	defer channel.Close()
	ctx, cancel := c.context()
	defer cancel()
	response, err := runnerv1.NewInstanceServiceClient(channel).StopInstance(
		ctx, &runnerv1.StopInstanceRequest{InstanceId: words[0]})
	if err != nil {
		return err
	}
	fmt.Printf("instance %s %s\n", words[0], response.GetInstance().GetState())
	return nil
}

// address returns the best of a node's endpoints as text.
func address(endpoints []*commonv1.Endpoint) string {
	if len(endpoints) == 0 {
		return ":0"
	}
	host := endpoints[0].Address
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return fmt.Sprintf("%s:%d", host, endpoints[0].Port)
}

func layers(rank *placementv1.RankAssignment) string {
	return fmt.Sprintf("%d-%d", rank.GetLayers().GetStart(), rank.GetLayers().GetEnd())
}

// report prints a failed call's status, with the google.rpc.ErrorInfo and RetryInfo in its details.
func report(err error) {
	if kept, ok := err.(fault); ok {
		printError(kept.data.Code, kept.data.Reason, kept.data.Message, kept.data.Metadata, nil)
		return
	}
	failed := status.Convert(err)
	info := &errdetails.ErrorInfo{}
	var retry *errdetails.RetryInfo
	for _, detail := range failed.Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			info = found
		case *errdetails.RetryInfo:
			retry = found
		}
	}
	printError(int32(failed.Code()), info.Reason, failed.Message(), info.Metadata, retry)
}

func printError(
	code int32, reason, message string, figures map[string]string, retry *errdetails.RetryInfo,
) {
	name := strconv.Itoa(int(code))
	if 0 <= code && int(code) < len(codeNames) {
		name = codeNames[code]
	}
	if reason != "" {
		name += " " + reason
	}
	fmt.Fprintf(os.Stderr, "error %s: %s\n", name, message)
	keys := make([]string, 0, len(figures))
	for key := range figures {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	for _, key := range keys {
		fmt.Fprintf(os.Stderr, "  %s=%s\n", key, figures[key])
	}
	if retry != nil {
		delay := retry.RetryDelay.AsDuration().Milliseconds()
		fmt.Fprintf(os.Stderr, "  retry after %d ms\n", delay)
	}
}
