// sarama.
package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/IBM/sarama"
)

type saramaClient struct{}

func saramaConfig(o options) *sarama.Config {
	c := sarama.NewConfig()
	c.ClientID = o.clientID
	c.Version = sarama.V3_6_0_0
	c.Producer.Return.Successes = true
	c.Producer.Return.Errors = true
	c.Producer.MaxMessageBytes = 32 << 20
	c.Producer.Flush.Frequency = time.Duration(o.linger) * time.Millisecond
	c.Producer.RequiredAcks = map[string]sarama.RequiredAcks{
		"0": sarama.NoResponse, "1": sarama.WaitForLocal, "all": sarama.WaitForAll}[o.acks]
	c.Producer.Compression = map[string]sarama.CompressionCodec{
		"none": sarama.CompressionNone, "gzip": sarama.CompressionGZIP, "snappy": sarama.CompressionSnappy,
		"lz4": sarama.CompressionLZ4, "zstd": sarama.CompressionZSTD}[o.codec]
	c.Producer.Partitioner = func(topic string) sarama.Partitioner {
		return saramaPartitioner{sarama.NewRoundRobinPartitioner(topic)}
	}
	if o.idempotent {
		c.Producer.Idempotent = true
		c.Net.MaxOpenRequests = 1
	}
	c.Consumer.Offsets.Initial = sarama.OffsetOldest
	if o.reset == "latest" {
		c.Consumer.Offsets.Initial = sarama.OffsetNewest
	}
	c.Consumer.Offsets.AutoCommit.Enable = false
	c.Consumer.Return.Errors = true
	c.Consumer.Group.Session.Timeout = time.Duration(o.session) * time.Millisecond
	c.Consumer.Group.InstanceId = o.instance
	if o.isolation == "read_committed" {
		c.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	return c
}

// saramaPartitioner uses the partition that the record names, if it names one.
type saramaPartitioner struct{ otherwise sarama.Partitioner }

func (saramaPartitioner) RequiresConsistency() bool { return true }

func (s saramaPartitioner) Partition(m *sarama.ProducerMessage, n int32) (int32, error) {
	if m.Partition >= 0 {
		return m.Partition, nil
	}
	return s.otherwise.Partition(m, n)
}

func (saramaClient) produce(o options) error {
	producer, err := sarama.NewAsyncProducer([]string{o.bootstrap}, saramaConfig(o))
	if err != nil {
		return err
	}
	var done sync.WaitGroup
	done.Add(2)
	go func() {
		defer done.Done()
		for m := range producer.Successes() {
			ack(m.Metadata.(int64), m.Partition, m.Offset, nil)
		}
	}()
	go func() {
		defer done.Done()
		for e := range producer.Errors() {
			ack(e.Msg.Metadata.(int64), e.Msg.Partition, -1, e.Err)
		}
	}()
	err = recordsIn(func(r record) error {
		m := &sarama.ProducerMessage{Topic: o.topic, Metadata: *r.N, Partition: -1}
		if r.K != nil {
			m.Key = sarama.ByteEncoder(unhex(r.K))
		}
		if r.V != nil {
			m.Value = sarama.ByteEncoder(unhex(r.V))
		}
		if r.P != nil {
			m.Partition = *r.P
		}
		if r.T != nil {
			m.Timestamp = time.UnixMilli(*r.T)
		}
		for _, h := range headersIn(r) {
			m.Headers = append(m.Headers, sarama.RecordHeader{Key: []byte(h.name), Value: h.value})
		}
		producer.Input() <- m
		return nil
	})
	producer.AsyncClose()
	done.Wait()
	return err
}

func (saramaClient) consume(o options) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(o.seconds)*time.Second)
	defer cancel()
	if o.group == "" {
		return saramaAssign(ctx, o)
	}
	group, err := sarama.NewConsumerGroup([]string{o.bootstrap}, o.group, saramaConfig(o))
	if err != nil {
		return err
	}
	defer group.Close()
	go func() {
		for err := range group.Errors() {
			say(map[string]any{"error": err.Error()})
		}
	}()
	handler := &saramaHandler{o: o, cancel: cancel, reached: map[int32][2]int64{}}
	handler.left.Store(o.count)
	for ctx.Err() == nil {
		if err := group.Consume(ctx, []string{o.topic}, handler); err != nil && ctx.Err() == nil {
			return err
		}
	}
	handler.sayEnds()
	return nil
}

type saramaHandler struct {
	o       options
	cancel  context.CancelFunc
	left    atomic.Int64
	lock    sync.Mutex
	reached map[int32][2]int64
}

func (h *saramaHandler) Setup(s sarama.ConsumerGroupSession) error {
	sayAssigned(s.Claims()[h.o.topic])
	return nil
}

func (*saramaHandler) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (h *saramaHandler) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	for {
		select {
		case m, ok := <-c.Messages():
			if !ok {
				return nil
			}
			saramaSaid(m)
			s.MarkMessage(m, "")
			if h.o.commit {
				s.Commit()
			}
			h.note(c.Partition(), m.Offset+1, c.HighWaterMarkOffset())
			if h.left.Add(-1) <= 0 {
				h.cancel()
			}
		case <-s.Context().Done():
			return nil
		}
	}
}

func (h *saramaHandler) note(p int32, position, high int64) {
	h.lock.Lock()
	defer h.lock.Unlock()
	h.reached[p] = [2]int64{position, high}
	if h.o.untilEnd && atEnd(h.reached) {
		h.cancel()
	}
}

func (h *saramaHandler) sayEnds() {
	h.lock.Lock()
	defer h.lock.Unlock()
	for p, r := range h.reached {
		sayEnd(p, r[0], r[1])
	}
}

func saramaSaid(m *sarama.ConsumerMessage) {
	var headers []header
	for _, h := range m.Headers {
		headers = append(headers, header{string(h.Key), h.Value})
	}
	said(m.Partition, m.Offset, m.Timestamp, m.Key, m.Value, headers)
}

func saramaAssign(ctx context.Context, o options) error {
	consumer, err := sarama.NewConsumer([]string{o.bootstrap}, saramaConfig(o))
	if err != nil {
		return err
	}
	defer consumer.Close()
	partitions, err := consumer.Partitions(o.topic)
	if err != nil {
		return err
	}
	start := sarama.OffsetOldest
	if o.reset == "latest" {
		start = sarama.OffsetNewest
	}
	messages := make(chan *sarama.ConsumerMessage, 100)
	for _, p := range partitions {
		one, err := consumer.ConsumePartition(o.topic, p, start)
		if err != nil {
			return err
		}
		go func() {
			for m := range one.Messages() {
				messages <- m
			}
		}()
	}
	sayAssigned(partitions)
	for left := o.count; left > 0; left-- {
		select {
		case m := <-messages:
			saramaSaid(m)
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}
