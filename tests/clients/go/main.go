// SPDX-License-Identifier: Apache-2.0

// Command clients runs members of groups with franz-go. Usage: clients ADDRESS. It prints a line per scenario, and
// "N passed, N failed" at the end. With clients ADDRESS SOURCE TARGET it copies a topic instead, until it is killed.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	partitions = 6
	patience   = 20 * time.Second
)

type scenario struct {
	name string
	run  func(address, name string) error
}

// There is no scenario with a static member of the consumer protocol. When such a member leaves temporarily, franz-go
// 1.22 omits the instance id, and brokers reject that.
var scenarios = []scenario{
	{"go-classic-eager", func(address, name string) error { return share(address, name, eager) }},
	{"go-classic-cooperative", func(address, name string) error { return share(address, name, cooperative) }},
	{"go-consumer", func(address, name string) error { return share(address, name, consumer) }},
	{"go-classic-static", func(address, name string) error { return static(address, name, cooperative) }},
	{"go-classic-resume", func(address, name string) error { return resume(address, name, cooperative) }},
	{"go-consumer-resume", func(address, name string) error { return resume(address, name, consumer) }},
	{"go-migration-eager", func(address, name string) error { return migrate(address, name, eager) }},
	{"go-migration-cooperative", func(address, name string) error { return migrate(address, name, cooperative) }},
}

func main() {
	address := os.Args[1]
	if len(os.Args) > 2 {
		fmt.Println("error", copyTopic(address, os.Args[2], os.Args[3]))
		return
	}
	failed := 0
	for _, scenario := range scenarios {
		began := time.Now()
		if err := scenario.run(address, scenario.name); err != nil {
			failed++
			fmt.Printf("FAILED %s: %v\n", scenario.name, err)
		} else {
			fmt.Printf("ok %s %.1f s\n", scenario.name, time.Since(began).Seconds())
		}
	}
	fmt.Printf("%d passed, %d failed\n", len(scenarios)-failed, failed)
	if failed > 0 {
		os.Exit(1)
	}
}

// share: three members join one after the other and read all records once. Then the first member leaves.
func share(address, name string, how protocol) error {
	producer, err := newProducer(address, name)
	if err != nil {
		return err
	}
	defer producer.close()
	group := &fleet{address: address, name: name}
	defer group.close()
	for range 3 {
		if err := group.add(how, ""); err != nil {
			return err
		}
		if err := group.settle(); err != nil {
			return err
		}
	}
	if err := producer.produce(20); err != nil {
		return err
	}
	if err := group.awaitSeen(20); err != nil {
		return err
	}
	group.leave(0)
	if err := group.settle(); err != nil {
		return err
	}
	if err := producer.produce(5); err != nil {
		return err
	}
	if err := group.awaitSeen(25); err != nil {
		return err
	}
	return group.faults()
}

// static: a static member that restarts gets its partitions back, and the other member keeps its own.
func static(address, name string, how protocol) error {
	producer, err := newProducer(address, name)
	if err != nil {
		return err
	}
	defer producer.close()
	group := &fleet{address: address, name: name}
	defer group.close()
	for _, instance := range []string{"one", "two"} {
		if err := group.add(how, instance); err != nil {
			return err
		}
		if err := group.settle(); err != nil {
			return err
		}
	}
	owned, revocations := group.members[0].owned(), group.members[1].revocations()
	group.leave(0)
	if err := group.add(how, "one"); err != nil {
		return err
	}
	restarted := group.members[1]
	if err := await("the same partitions as before", func() bool { return equal(restarted.owned(), owned) }); err != nil {
		return err
	}
	if group.members[0].revocations() != revocations {
		return fmt.Errorf("the other static member lost partitions")
	}
	return group.faults()
}

// resume: a new member of the group begins at the offsets that the old member committed.
func resume(address, name string, how protocol) error {
	producer, err := newProducer(address, name)
	if err != nil {
		return err
	}
	defer producer.close()
	for round := int64(0); round < 2; round++ {
		if err := producer.produce(10); err != nil {
			return err
		}
		group := &fleet{address: address, name: name}
		if err := group.add(how, ""); err != nil {
			return err
		}
		err := await("the new records", func() bool { return len(group.seen()) >= 10*partitions })
		group.close()
		if err != nil {
			return err
		}
		for record := range group.seen() {
			if record.offset < 10*round {
				return fmt.Errorf("offset %d is read again", record.offset)
			}
		}
	}
	return nil
}

// migrate: three members move to the consumer protocol and back, one by one, while records are produced.
func migrate(address, name string, how protocol) error {
	producer, err := newProducer(address, name)
	if err != nil {
		return err
	}
	defer producer.close()
	group := &fleet{address: address, name: name}
	defer group.close()
	for range 3 {
		if err := group.add(how, ""); err != nil {
			return err
		}
	}
	if err := group.settle(); err != nil {
		return err
	}
	rounds := 0
	for _, next := range []protocol{consumer, how} {
		for range 3 {
			group.leave(0)
			if err := producer.produce(10); err != nil {
				return err
			}
			rounds++
			if err := group.add(next, ""); err != nil {
				return err
			}
			if err := group.settle(); err != nil {
				return fmt.Errorf("to %v, after %d members: %w", next, rounds, err)
			}
		}
		if err := hasType(address, name, next); err != nil {
			return err
		}
	}
	if err := group.awaitSeen(10 * rounds); err != nil {
		return err
	}
	return group.faults()
}

func hasType(address, name string, how protocol) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(address))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	groupType := "classic"
	if how == consumer {
		groupType = "consumer"
	}
	listed, err := kadm.NewClient(client).ListGroupsByType(ctx, []string{groupType})
	if err != nil {
		return err
	}
	if _, isListed := listed[name]; !isListed {
		return fmt.Errorf("the group is not a %s group", groupType)
	}
	return nil
}
