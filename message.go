package outbox

import (
	"encoding/json"
	"fmt"
	"time"
)

// Message is what a publisher adds to an outbox. It is an Event itself, so
// that it can be given to Add as it is.
type Message struct {
	// Outbox is the name of a configured outbox; empty: the default outbox.
	Outbox string
	// Type says what the message is, such as "order.placed". Required, at most
	// MaxTypeBytes.
	Type string
	// GroupKey is the ordering group: messages of one group are delivered in
	// the order of their commits. Empty: the message has none. At most
	// MaxGroupKeyBytes.
	GroupKey string
	// Payload is opaque and delivered byte for byte; nil and empty are the
	// same. At most MaxPayloadBytes. Add does not keep it.
	Payload []byte
	// Headers are delivered with the message. Keys and values are text; at
	// most MaxHeadersBytes of both together.
	Headers map[string]string
	// DeliverAt is when the message is due, to the microsecond, by the
	// database's clock; zero, or a time that has passed: at once. A message
	// with a future DeliverAt does not hold its group: its place in the order
	// counts from its due time.
	DeliverAt time.Time
	// Delay is the same as a time after the add, by the database's clock. It
	// excludes DeliverAt.
	Delay time.Duration
}

// OutboxMessage implements Event. It returns m.
func (m Message) OutboxMessage() (Message, error) { return m, nil }

// Event is something that can be added to an outbox. Domain events implement
// it, usually with JSON. Add calls OutboxMessage once, before it touches the
// database, on the caller's goroutine.
type Event interface {
	OutboxMessage() (Message, error)
}

// MessageOption sets a field of a message that JSON or NewEvent makes.
type MessageOption func(*Message)

// Group puts the message into an ordering group.
func Group(key string) MessageOption { return func(m *Message) { m.GroupKey = key } }

// To names the outbox, instead of the default one.
func To(outbox string) MessageOption { return func(m *Message) { m.Outbox = outbox } }

// Header adds a header. The last one of a key counts.
func Header(key, value string) MessageOption {
	return func(m *Message) {
		if m.Headers == nil {
			m.Headers = make(map[string]string)
		}
		m.Headers[key] = value
	}
}

// At has the message delivered at t, or at once if t has passed.
func At(t time.Time) MessageOption { return func(m *Message) { m.DeliverAt = t } }

// After has the message delivered d after it was added.
func After(d time.Duration) MessageOption { return func(m *Message) { m.Delay = d } }

// JSON makes a message whose payload is body in JSON, as encoding/json writes
// it. It is meant for OutboxMessage methods:
//
//	func (e OrderPlaced) OutboxMessage() (outbox.Message, error) {
//		return outbox.JSON("order.placed", e, outbox.Group(e.OrderID))
//	}
//
// Its error is that of encoding/json.
func JSON(typ string, body any, opts ...MessageOption) (Message, error) {
	payload, err := json.Marshal(body)
	if err != nil {
		return Message{}, fmt.Errorf("encode the body of %q: %w", typ, err)
	}
	m := Message{Type: typ, Payload: payload}
	for _, opt := range opts {
		opt(&m)
	}
	return m, nil
}

// NewEvent is JSON in the form of an Event, for what has no type of its own.
// The body is encoded at once; an error of that surfaces in Add.
func NewEvent(typ string, body any, opts ...MessageOption) Event {
	m, err := JSON(typ, body, opts...)
	return encoded{m, err}
}

type encoded struct {
	message Message
	err     error
}

func (e encoded) OutboxMessage() (Message, error) { return e.message, e.err }

// Events turns a slice of one event type into the arguments of Add:
//
//	outbox.Add(tx, outbox.Events(order.Events)...)
func Events[E Event](list []E) []Event {
	events := make([]Event, len(list))
	for i, e := range list {
		events[i] = e
	}
	return events
}
