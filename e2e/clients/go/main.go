// One command line over three Go clients: franz-go, sarama and segmentio's kafka-go, with the same
// options and lines as python/client.py:
//
//	clients LIBRARY produce|consume --bootstrap HOST:PORT --topic NAME ...
package main

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"sync"
	"time"
)

type options struct {
	bootstrap, topic, clientID, acks, codec, group, instance, reset, isolation string
	seconds, linger, session                                                   int
	count                                                                      int64
	idempotent, commit, untilEnd                                               bool
}

// record is one line of input or output; pointers are null-able.
type record struct {
	N *int64       `json:"n,omitempty"`
	P *int32       `json:"p"`
	O int64        `json:"o"`
	T *int64       `json:"t"`
	K *string      `json:"k"`
	V *string      `json:"v"`
	H [][2]*string `json:"h"`
}

type header struct {
	name  string
	value []byte
}

type client interface {
	produce(options) error
	consume(options) error
}

var libraries = map[string]client{"franz-go": franz{}, "sarama": saramaClient{}, "kafka-go": segmentio{}}

func main() {
	if len(os.Args) < 3 {
		fail(fmt.Errorf("usage: clients LIBRARY produce|consume --bootstrap HOST:PORT --topic NAME"))
	}
	library, ok := libraries[os.Args[1]]
	if !ok {
		fail(fmt.Errorf("no library %q", os.Args[1]))
	}
	o := parse(os.Args[3:])
	action := library.consume
	if os.Args[2] == "produce" {
		action = library.produce
	}
	if err := action(o); err != nil {
		fail(err)
	}
}

func parse(args []string) (o options) {
	set := flag.NewFlagSet("clients", flag.ExitOnError)
	set.StringVar(&o.bootstrap, "bootstrap", "", "")
	set.StringVar(&o.topic, "topic", "", "")
	set.StringVar(&o.clientID, "client-id", "e2e", "")
	set.StringVar(&o.acks, "acks", "all", "")
	set.StringVar(&o.codec, "codec", "none", "")
	set.StringVar(&o.group, "group", "", "")
	set.StringVar(&o.instance, "instance", "", "")
	set.StringVar(&o.reset, "reset", "earliest", "")
	set.StringVar(&o.isolation, "isolation", "read_uncommitted", "")
	set.IntVar(&o.seconds, "seconds", 60, "")
	set.IntVar(&o.linger, "linger", 5, "")
	set.IntVar(&o.session, "session", 10000, "")
	set.Int64Var(&o.count, "count", 1<<40, "")
	set.BoolVar(&o.idempotent, "idempotent", false, "")
	set.BoolVar(&o.commit, "commit", false, "")
	set.BoolVar(&o.untilEnd, "until-end", false, "")
	_ = set.Parse(args)
	return o
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// --- lines ------------------------------------------------------------------------------------

var out sync.Mutex

func say(line any) {
	data, err := json.Marshal(line)
	if err != nil {
		fail(err)
	}
	out.Lock()
	defer out.Unlock()
	_, _ = os.Stdout.Write(append(data, '\n'))
}

func ack(n int64, p int32, o int64, err error) {
	if err != nil {
		say(map[string]any{"n": n, "error": err.Error()})
		return
	}
	say(map[string]any{"n": n, "p": p, "o": o})
}

func said(p int32, o int64, when time.Time, key, value []byte, headers []header) {
	t := when.UnixMilli()
	list := [][2]*string{}
	for _, h := range headers {
		name := h.name
		list = append(list, [2]*string{&name, tohex(h.value)})
	}
	say(record{P: &p, O: o, T: &t, K: tohex(key), V: tohex(value), H: list})
}

func sayAssigned(partitions []int32) {
	if partitions == nil {
		partitions = []int32{}
	}
	say(map[string]any{"assigned": partitions})
}

func sayEnd(p int32, position, high int64) {
	say(map[string]any{"end": p, "position": position, "high": high})
}

func recordsIn(each func(record) error) error {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var r record
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			return err
		}
		if err := each(r); err != nil {
			return err
		}
	}
	return lines.Err()
}

func unhex(text *string) []byte {
	if text == nil {
		return nil
	}
	data, err := hex.DecodeString(*text)
	if err != nil {
		fail(err)
	}
	return data // of no bytes: empty, not nil
}

func tohex(data []byte) *string {
	if data == nil {
		return nil
	}
	text := hex.EncodeToString(data)
	return &text
}

func headersIn(r record) (list []header) {
	for _, h := range r.H {
		list = append(list, header{*h[0], unhex(h[1])})
	}
	return list
}
