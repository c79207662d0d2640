// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// retryAfter is how long a poll waits for records before the member retries a rejected commit.
const retryAfter = 100 * time.Millisecond

type protocol int

const (
	eager protocol = iota
	cooperative
	consumer
)

type record struct {
	partition int32
	offset    int64
}

// member polls continuously, and commits records before they count as seen. The broker rejects a commit during a
// rebalance (as Kafka 4.3.1 does). The member then commits the records again, unless it has lost their partition.
type member struct {
	client  *kgo.Client
	group   *fleet
	done    chan struct{}
	cancel  context.CancelFunc
	lock    sync.Mutex
	has     map[int32]bool
	read    map[record]bool
	kept    []*kgo.Record
	revoked int
}

// fleet is a group. It has the current members and all members that were ever in it, with the records they have seen.
type fleet struct {
	address, name string
	members, all  []*member
	lock          sync.Mutex
	owners        map[int32]*member
	conflicts     []string
}

func (f *fleet) add(how protocol, instance string) error {
	m := &member{group: f, done: make(chan struct{}), has: map[int32]bool{}, read: map[record]bool{}}
	options := []kgo.Opt{
		kgo.SeedBrokers(f.address),
		kgo.ConsumerGroup(f.name),
		kgo.ConsumeTopics(f.name),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
		kgo.HeartbeatInterval(300 * time.Millisecond),
		kgo.SessionTimeout(6 * time.Second),
		kgo.FetchMaxWait(200 * time.Millisecond),
		kgo.MetadataMinAge(100 * time.Millisecond),
		kgo.OnPartitionsAssigned(m.assigned),
		kgo.OnPartitionsRevoked(m.lost),
		kgo.OnPartitionsLost(m.lost),
	}
	switch how {
	case eager:
		options = append(options, kgo.Balancers(kgo.RangeBalancer()))
	case cooperative:
		options = append(options, kgo.Balancers(kgo.CooperativeStickyBalancer()))
	case consumer:
		options = append(options, kgo.Balancers(kgo.RangeBalancer()), kgo.ServerSideBalancer())
	}
	if instance != "" {
		options = append(options, kgo.InstanceID(instance))
	}
	client, err := kgo.NewClient(options...)
	if err != nil {
		return err
	}
	m.client = client
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	f.members, f.all = append(f.members, m), append(f.all, m)
	go m.poll(ctx)
	return nil
}

func (m *member) poll(ctx context.Context) {
	defer close(m.done)
	for ctx.Err() == nil {
		soon, cancel := context.WithTimeout(ctx, retryAfter)
		m.keep(m.client.PollFetches(soon).Records())
		cancel()
		m.commit()
		m.client.AllowRebalance()
	}
}

func (m *member) keep(records []*kgo.Record) {
	m.lock.Lock()
	defer m.lock.Unlock()
	m.kept = append(m.kept, records...)
}

// commit runs between a poll and AllowRebalance, so that no partition is lost during the commit.
func (m *member) commit() {
	if len(m.kept) == 0 || m.client.CommitRecords(context.Background(), m.kept...) != nil {
		return
	}
	m.lock.Lock()
	defer m.lock.Unlock()
	for _, kept := range m.kept {
		m.read[record{kept.Partition, kept.Offset}] = true
	}
	m.kept = nil
}

func (m *member) assigned(_ context.Context, _ *kgo.Client, got map[string][]int32) {
	m.group.lock.Lock()
	defer m.group.lock.Unlock()
	m.lock.Lock()
	defer m.lock.Unlock()
	if m.group.owners == nil {
		m.group.owners = map[int32]*member{}
	}
	for _, partition := range got[m.group.name] {
		if owner := m.group.owners[partition]; owner != nil && owner != m {
			m.group.conflicts = append(m.group.conflicts, fmt.Sprintf("partition %d had two owners", partition))
		}
		m.group.owners[partition] = m
		m.has[partition] = true
	}
}

func (m *member) lost(_ context.Context, _ *kgo.Client, gone map[string][]int32) {
	m.group.lock.Lock()
	defer m.group.lock.Unlock()
	m.lock.Lock()
	defer m.lock.Unlock()
	for _, partition := range gone[m.group.name] {
		m.revoked++
		delete(m.has, partition)
		if m.group.owners[partition] == m {
			delete(m.group.owners, partition)
		}
		m.kept = slices.DeleteFunc(m.kept, func(kept *kgo.Record) bool { return kept.Partition == partition })
	}
}

func (m *member) owned() map[int32]bool {
	m.lock.Lock()
	defer m.lock.Unlock()
	copied := map[int32]bool{}
	for partition := range m.has {
		copied[partition] = true
	}
	return copied
}

func (m *member) revocations() int {
	m.lock.Lock()
	defer m.lock.Unlock()
	return m.revoked
}

func (m *member) close() {
	m.cancel()
	<-m.done
	m.client.CloseAllowingRebalance()
}

func (f *fleet) leave(index int) {
	gone := f.members[index]
	f.members = append(append([]*member{}, f.members[:index]...), f.members[index+1:]...)
	gone.close()
	// A static member keeps its partitions while it is away, so the client calls no callback.
	gone.lost(context.Background(), nil, map[string][]int32{f.name: keys(gone.owned())})
}

func (f *fleet) close() {
	for len(f.members) > 0 {
		f.leave(0)
	}
}

// settle waits until the members own all partitions, each partition once, as evenly as possible.
func (f *fleet) settle() error {
	return await("a balanced assignment", func() bool {
		total, least, most := map[int32]bool{}, partitions, 0
		sum := 0
		for _, member := range f.members {
			owned := member.owned()
			for partition := range owned {
				total[partition] = true
			}
			sum += len(owned)
			least, most = min(least, len(owned)), max(most, len(owned))
		}
		return sum == partitions && len(total) == partitions && most-least <= 1
	})
}

func (f *fleet) seen() map[record]bool {
	all := map[record]bool{}
	for _, member := range f.all {
		member.lock.Lock()
		for seen := range member.read {
			all[seen] = true
		}
		member.lock.Unlock()
	}
	return all
}

func (f *fleet) awaitSeen(perPartition int) error {
	return await(fmt.Sprintf("%d records of each partition", perPartition), func() bool {
		return len(f.seen()) == perPartition*partitions
	})
}

func (f *fleet) faults() error {
	f.lock.Lock()
	defer f.lock.Unlock()
	if len(f.conflicts) > 0 {
		return fmt.Errorf("%v", f.conflicts)
	}
	return nil
}

type producer struct {
	client *kgo.Client
	topic  string
}

// newProducer creates the topic and a producer for it.
func newProducer(address, topic string) (*producer, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(address), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if _, err := kadm.NewClient(client).CreateTopic(ctx, partitions, 1, nil, topic); err != nil {
		client.Close()
		return nil, err
	}
	return &producer{client, topic}, nil
}

// produce writes count records to each partition.
func (p *producer) produce(count int) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var records []*kgo.Record
	for partition := int32(0); partition < partitions; partition++ {
		for range count {
			records = append(records, &kgo.Record{Topic: p.topic, Partition: partition, Value: []byte("x")})
		}
	}
	return p.client.ProduceSync(ctx, records...).FirstErr()
}

func (p *producer) close() {
	p.client.Close()
}

func await(what string, condition func() bool) error {
	deadline := time.Now().Add(patience)
	for !condition() {
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %v: %s", patience, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

func keys(of map[int32]bool) []int32 {
	var list []int32
	for key := range of {
		list = append(list, key)
	}
	return list
}

func equal(first, second map[int32]bool) bool {
	if len(first) != len(second) {
		return false
	}
	for key := range first {
		if !second[key] {
			return false
		}
	}
	return true
}
