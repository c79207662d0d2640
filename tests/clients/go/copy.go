// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// copyTopic copies a topic at least once, until the program is killed: consume, produce, commit. The target is also the
// group. Its last word is the protocol. The function prints a line for each error that reaches it.
func copyTopic(address, source, target string) error {
	options := []kgo.Opt{
		kgo.SeedBrokers(strings.Split(address, ",")...),
		kgo.ConsumerGroup(target),
		kgo.ConsumeTopics(source),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
	}
	if strings.HasSuffix(target, "consumer") {
		options = append(options, kgo.Balancers(kgo.RangeBalancer()), kgo.ServerSideBalancer())
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	for {
		client.AllowRebalance()
		soon, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		fetches := client.PollFetches(soon)
		cancel()
		fetches.EachError(func(_ string, _ int32, err error) {
			if !errors.Is(err, context.DeadlineExceeded) {
				report(err)
			}
		})
		var copies []*kgo.Record
		for _, record := range fetches.Records() {
			copies = append(copies, &kgo.Record{Topic: target, Key: record.Key, Value: record.Value})
		}
		if len(copies) == 0 {
			continue
		}
		report(client.ProduceSync(context.Background(), copies...).FirstErr())
		report(client.CommitUncommittedOffsets(context.Background()))
	}
}

// report prints an error. Retriable errors are those of the protocol and of connections, and the notice that the client
// has lost its group session and joins again (Fetches.Errors says that it is informational).
func report(err error) {
	var session *kgo.ErrGroupSession
	var network *net.OpError
	switch {
	case err == nil:
	case kerr.IsRetriable(err), kgo.IsRetryableBrokerErr(err), errors.As(err, &session), errors.As(err, &network):
		fmt.Println("retriable", err)
	default:
		fmt.Println("error", err)
	}
}
