// segmentio's kafka-go.
package main

import (
	"context"
	"errors"
	"time"

	kafka "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/compress"
)

type segmentio struct{}

func (segmentio) produce(o options) error {
	codec := map[string]compress.Compression{
		"gzip": compress.Gzip, "snappy": compress.Snappy, "lz4": compress.Lz4, "zstd": compress.Zstd}[o.codec]
	acks := map[string]kafka.RequiredAcks{"0": kafka.RequireNone, "1": kafka.RequireOne, "all": kafka.RequireAll}[o.acks]
	writer := &kafka.Writer{
		Addr: kafka.TCP(o.bootstrap), Topic: o.topic, RequiredAcks: acks, Compression: codec,
		BatchTimeout: time.Duration(o.linger) * time.Millisecond, BatchBytes: 32 << 20, Async: true,
		Balancer: kafka.BalancerFunc(balance), AllowAutoTopicCreation: true,
		Transport: &kafka.Transport{ClientID: o.clientID},
		Completion: func(done []kafka.Message, err error) {
			for _, m := range done {
				ack(m.WriterData.(origin).n, int32(m.Partition), m.Offset, err)
			}
		},
	}
	err := recordsIn(func(r record) error {
		want := -1
		if r.P != nil {
			want = int(*r.P)
		}
		m := kafka.Message{Key: unhex(r.K), Value: unhex(r.V), WriterData: origin{*r.N, want}}
		if r.T != nil {
			m.Time = time.UnixMilli(*r.T)
		}
		for _, h := range headersIn(r) {
			m.Headers = append(m.Headers, kafka.Header{Key: h.name, Value: h.value})
		}
		return writer.WriteMessages(context.Background(), m)
	})
	if closing := writer.Close(); err == nil {
		err = closing
	}
	return err
}

// origin travels with a message: its number and the partition it asks for (-1: any).
type origin struct {
	n    int64
	want int
}

func balance(m kafka.Message, partitions ...int) int {
	if r := m.WriterData.(origin); r.want >= 0 {
		return r.want
	}
	return partitions[int(m.WriterData.(origin).n)%len(partitions)]
}

func (segmentio) consume(o options) error {
	start := kafka.FirstOffset
	if o.reset == "latest" {
		start = kafka.LastOffset
	}
	config := kafka.ReaderConfig{
		Brokers: []string{o.bootstrap}, Topic: o.topic, MinBytes: 1, MaxBytes: 32 << 20,
		MaxWait: 500 * time.Millisecond, StartOffset: start, Dialer: &kafka.Dialer{ClientID: o.clientID, Timeout: 10 * time.Second},
		SessionTimeout: time.Duration(o.session) * time.Millisecond,
	}
	if o.isolation == "read_committed" {
		config.IsolationLevel = kafka.ReadCommitted
	}
	if o.group != "" {
		config.GroupID = o.group
	}
	reader := kafka.NewReader(config)
	defer reader.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(o.seconds)*time.Second)
	defer cancel()
	reached := map[int32][2]int64{}
	for left := o.count; left > 0; left-- {
		m, err := reader.FetchMessage(ctx)
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			return err
		}
		var headers []header
		for _, h := range m.Headers {
			headers = append(headers, header{h.Key, h.Value})
		}
		said(int32(m.Partition), m.Offset, m.Time, m.Key, m.Value, headers)
		if o.commit && o.group != "" {
			if err := reader.CommitMessages(ctx, m); err != nil {
				return err
			}
		}
		reached[int32(m.Partition)] = [2]int64{m.Offset + 1, m.HighWaterMark}
		if o.untilEnd && atEnd(reached) {
			break
		}
	}
	for p, r := range reached {
		sayEnd(p, r[0], r[1])
	}
	return nil
}
