// franz-go.
package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

type franz struct{}

func (franz) produce(o options) error {
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	opts := []kgo.Opt{
		kgo.SeedBrokers(o.bootstrap), kgo.ClientID(o.clientID), kgo.DefaultProduceTopic(o.topic),
		kgo.AllowAutoTopicCreation(), kgo.ProducerBatchCompression(codecs[o.codec]),
		kgo.ProducerLinger(time.Duration(o.linger) * time.Millisecond),
		kgo.ProducerBatchMaxBytes(32 << 20), kgo.BrokerMaxWriteBytes(64 << 20),
		kgo.RecordPartitioner(explicitOr{kgo.UniformBytesPartitioner(64<<10, false, false, nil)}),
		kgo.RecordDeliveryTimeout(time.Duration(o.seconds) * time.Second),
	}
	switch o.acks {
	case "0":
		opts = append(opts, kgo.RequiredAcks(kgo.NoAck()))
	case "1":
		opts = append(opts, kgo.RequiredAcks(kgo.LeaderAck()))
	}
	if !o.idempotent {
		opts = append(opts, kgo.DisableIdempotentWrite())
	}
	cl, err := kgo.NewClient(opts...)
	if err != nil {
		return err
	}
	defer cl.Close()
	err = recordsIn(func(r record) error {
		out := &kgo.Record{Key: unhex(r.K), Value: unhex(r.V), Partition: -1}
		if r.P != nil {
			out.Partition = *r.P
		}
		if r.T != nil {
			out.Timestamp = time.UnixMilli(*r.T)
		}
		for _, h := range headersIn(r) {
			out.Headers = append(out.Headers, kgo.RecordHeader{Key: h.name, Value: h.value})
		}
		n := *r.N
		cl.Produce(context.Background(), out, func(done *kgo.Record, err error) {
			ack(n, done.Partition, done.Offset, err)
		})
		return nil
	})
	if err != nil {
		return err
	}
	return cl.Flush(context.Background())
}

// explicitOr uses the record's own partition where it names one.
type explicitOr struct{ otherwise kgo.Partitioner }

func (e explicitOr) ForTopic(topic string) kgo.TopicPartitioner {
	return explicitTopic{e.otherwise.ForTopic(topic)}
}

type explicitTopic struct{ otherwise kgo.TopicPartitioner }

func (explicitTopic) RequiresConsistency(*kgo.Record) bool { return true }

func (e explicitTopic) Partition(r *kgo.Record, n int) int {
	if r.Partition >= 0 {
		return int(r.Partition)
	}
	return e.otherwise.Partition(r, n)
}

func (franz) consume(o options) error {
	start := kgo.NewOffset().AtStart()
	if o.reset == "latest" {
		start = kgo.NewOffset().AtEnd()
	}
	opts := []kgo.Opt{
		kgo.SeedBrokers(o.bootstrap), kgo.ClientID(o.clientID), kgo.ConsumeTopics(o.topic),
		kgo.ConsumeResetOffset(start), kgo.FetchMaxWait(500 * time.Millisecond),
	}
	if o.isolation == "read_committed" {
		opts = append(opts, kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	}
	if o.group != "" {
		var lock sync.Mutex
		opts = append(opts, kgo.ConsumerGroup(o.group), kgo.DisableAutoCommit(),
			kgo.SessionTimeout(time.Duration(o.session)*time.Millisecond),
			kgo.OnPartitionsAssigned(func(_ context.Context, _ *kgo.Client, got map[string][]int32) {
				lock.Lock()
				defer lock.Unlock()
				sayAssigned(got[o.topic])
			}))
		if o.instance != "" {
			opts = append(opts, kgo.InstanceID(o.instance))
		}
	}
	cl, err := kgo.NewClient(opts...)
	if err != nil {
		return err
	}
	defer cl.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(o.seconds)*time.Second)
	defer cancel()
	reached := map[int32][2]int64{}
	for left := o.count; left > 0 && ctx.Err() == nil; {
		poll, stop := context.WithTimeout(ctx, time.Second)
		fetches := cl.PollFetches(poll)
		stop()
		fetches.EachError(func(_ string, p int32, err error) {
			if poll.Err() == nil {
				say(map[string]any{"error": fmt.Sprintf("partition %d: %v", p, err)})
			}
		})
		fetches.EachRecord(func(r *kgo.Record) {
			var headers []header
			for _, h := range r.Headers {
				headers = append(headers, header{h.Key, h.Value})
			}
			said(r.Partition, r.Offset, r.Timestamp, r.Key, r.Value, headers)
			left--
		})
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			reached[p.Partition] = [2]int64{position(p, reached[p.Partition][0]), p.HighWatermark}
		})
		if o.commit && o.group != "" {
			if err := cl.CommitUncommittedOffsets(ctx); err != nil {
				return err
			}
		}
		if o.untilEnd && atEnd(reached) {
			break
		}
	}
	for p, r := range reached {
		sayEnd(p, r[0], r[1])
	}
	return nil
}

func position(p kgo.FetchTopicPartition, before int64) int64 {
	if n := len(p.Records); n > 0 {
		return p.Records[n-1].Offset + 1
	}
	return before
}

func atEnd(reached map[int32][2]int64) bool {
	for _, r := range reached {
		if r[0] < r[1] {
			return false
		}
	}
	return len(reached) > 0
}
