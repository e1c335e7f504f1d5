package outbox_test

import (
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

func TestJSON(t *testing.T) {
	t.Parallel()
	at := time.Date(2030, 1, 2, 3, 4, 5, 6000, time.UTC)
	m, err := outbox.JSON("order.placed", map[string]int{"total": 7},
		outbox.Group("o-1"), outbox.To("orders"), outbox.At(at),
		outbox.Header("a", "1"), outbox.Header("b", "2"), outbox.Header("a", "3"))
	if err != nil {
		t.Fatal(err)
	}
	if m.Type != "order.placed" || m.GroupKey != "o-1" || m.Outbox != "orders" || !m.DeliverAt.Equal(at) || m.Delay != 0 {
		t.Errorf("JSON = %+v", m)
	}
	if string(m.Payload) != `{"total":7}` {
		t.Errorf("Payload = %s", m.Payload)
	}
	if want := map[string]string{"a": "3", "b": "2"}; !maps.Equal(m.Headers, want) {
		t.Errorf("Headers = %v, want %v", m.Headers, want)
	}
}

func TestAfterSetsDelay(t *testing.T) {
	t.Parallel()
	m, err := outbox.JSON("t", nil, outbox.After(time.Minute))
	if err != nil || m.Delay != time.Minute || !m.DeliverAt.IsZero() {
		t.Errorf("JSON = %+v, %v", m, err)
	}
}

func TestNewEventHoldsItsErrorUntilAdd(t *testing.T) {
	t.Parallel()
	event := outbox.NewEvent("order.placed", make(chan int))
	if _, err := event.OutboxMessage(); err == nil || !strings.Contains(err.Error(), `"order.placed"`) {
		t.Errorf("OutboxMessage: %v, want an error that names the type", err)
	}
}

func TestNewEventEncodesAtOnce(t *testing.T) {
	t.Parallel()
	body := map[string]string{"state": "before"}
	event := outbox.NewEvent("t", body)
	body["state"] = "after"
	if m, _ := event.OutboxMessage(); string(m.Payload) != `{"state":"before"}` {
		t.Errorf("Payload = %s", m.Payload)
	}
}

func TestEvents(t *testing.T) {
	t.Parallel()
	events := outbox.Events([]outbox.Message{message("a"), message("b")})
	if len(events) != 2 || events[0].(outbox.Message).Type != "a" || events[1].(outbox.Message).Type != "b" {
		t.Errorf("Events = %v", events)
	}
}

// brokenEvent fails to make a message.
type brokenEvent struct{ err error }

func (e brokenEvent) OutboxMessage() (outbox.Message, error) { return outbox.Message{}, e.err }

var errBroken = errors.New("broken")

// badMessages are refused whatever the database is. C35 and others.
var badMessages = map[string]struct {
	event outbox.Event
	is    error
	want  string
}{
	"nil":                           {nil, outbox.ErrInvalidMessage, "outbox: invalid message: event 1 (<nil>): it is nil"},
	"failing event":                 {brokenEvent{errBroken}, outbox.ErrInvalidMessage, "event 1 (outbox_test.brokenEvent)"},
	"failing event keeps its error": {brokenEvent{errBroken}, errBroken, "broken"},
	"body that is no JSON":          {outbox.NewEvent("t", make(chan int)), outbox.ErrInvalidMessage, `encode the body of "t"`},

	"unknown outbox": {
		outbox.Message{Outbox: "odrers", Type: "t"},
		outbox.ErrUnknownOutbox,
		`outbox: unknown outbox "odrers"; there is "orders" (event 1, outbox.Message)`,
	},

	"no type":      {outbox.Message{}, outbox.ErrInvalidMessage, `Type is empty; it must say what the message is`},
	"long type":    {message(strings.Repeat("t", 256)), outbox.ErrInvalidMessage, "Type has 256 bytes; it must have at most 255"},
	"NUL in type":  {message("a\x00b"), outbox.ErrInvalidMessage, "Type has a NUL at byte 1"},
	"type no UTF8": {message("ab\xff"), outbox.ErrInvalidMessage, "Type has no valid UTF-8 at byte 2"},

	"long group": {
		outbox.Message{Type: "t", GroupKey: strings.Repeat("g", 16<<10+1)},
		outbox.ErrInvalidMessage,
		`type "t": GroupKey has 16385 bytes; it must have at most 16384`,
	},
	"NUL in group":  {outbox.Message{Type: "t", GroupKey: "\x00"}, outbox.ErrInvalidMessage, "GroupKey has a NUL at byte 0"},
	"group no UTF8": {outbox.Message{Type: "t", GroupKey: "�\xc3("}, outbox.ErrInvalidMessage, "GroupKey has no valid UTF-8 at byte 3"},

	"large payload": {
		outbox.Message{Type: "t", Payload: make([]byte, outbox.MaxPayloadBytes+1)},
		outbox.ErrInvalidMessage,
		"Payload has 67108865 bytes; it must have at most 67108864",
	},

	"NUL in header key":   {headers("a\x00", ""), outbox.ErrInvalidMessage, `the key of Headers["a\x00"] has a NUL at byte 1`},
	"NUL in header":       {headers("a", "b\x00"), outbox.ErrInvalidMessage, `Headers["a"] has a NUL at byte 1`},
	"header key no UTF8":  {headers("\xff", ""), outbox.ErrInvalidMessage, `the key of Headers["\xff"] has no valid UTF-8 at byte 0`},
	"lone surrogate":      {headers("a", "\xed\xa0\x80"), outbox.ErrInvalidMessage, `Headers["a"] has no valid UTF-8 at byte 0`},
	"too many of headers": {headers("a", strings.Repeat("v", 2<<20)), outbox.ErrInvalidMessage, "Headers have 2097153 bytes; they must have at most 2097152"},

	"negative delay": {outbox.Message{Type: "t", Delay: -1}, outbox.ErrInvalidMessage, "Delay is -1ns; it must not be negative"},
	"both due times": {
		outbox.Message{Type: "t", Delay: 1, DeliverAt: time.Now()},
		outbox.ErrInvalidMessage,
		"Delay is 1ns and DeliverAt is set; only one of them may be",
	},
	"too late": {
		outbox.Message{Type: "t", DeliverAt: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)},
		outbox.ErrInvalidMessage,
		"DeliverAt is 10000-01-01T00:00:00Z; its year must be from 1 to 9999",
	},
	"too early": {
		outbox.Message{Type: "t", DeliverAt: time.Date(0, 12, 31, 0, 0, 0, 0, time.UTC)},
		outbox.ErrInvalidMessage,
		"its year must be from 1 to 9999",
	},
}

func headers(key, value string) outbox.Message {
	return outbox.Message{Type: "t", Headers: map[string]string{key: value}}
}

// The tables do not exist, so that any SQL of the library would fail in
// another way, and on PostgreSQL break the transaction.
func TestAddRefusesBeforeAnySQL(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		createRows(t, db)
		install(t, db, one(nil))
		inTx(t, db, func(tx *gorm.DB) error {
			for name, bad := range badMessages {
				err := outbox.Add(tx, message("good"), bad.event)
				if !errors.Is(err, bad.is) || !strings.Contains(err.Error(), bad.want) {
					t.Errorf("%s: Add: %v\nwant %q", name, err, bad.want)
				}
			}
			return tx.Create(&Row{Name: "afterwards"}).Error
		})
		if n := countRows(t, db); n != 1 {
			t.Errorf("%d business rows, want 1", n)
		}
	})
}

func TestErrorsOfMessagesQuoteNoText(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	install(t, db, one(nil))
	const secret = "s3cret"
	inTx(t, db, func(tx *gorm.DB) error {
		for _, m := range []outbox.Message{
			headers("authorization", secret+"\x00"),
			{Type: "t", GroupKey: secret + "\xff"},
			{Type: "t", Payload: append([]byte(secret), make([]byte, outbox.MaxPayloadBytes)...)},
		} {
			if err := outbox.Add(tx, m); err == nil || strings.Contains(err.Error(), secret) {
				t.Errorf("Add: %.200v", err)
			}
		}
		return nil
	})
}

func TestRequireGroup(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	setUp(t, db, one(func(o *outbox.Outbox) { o.RequireGroup = true }))
	inTx(t, db, func(tx *gorm.DB) error {
		err := outbox.Add(tx, message("t"))
		if !errors.Is(err, outbox.ErrInvalidMessage) || !strings.Contains(err.Error(), `GroupKey is empty; the outbox requires one`) {
			t.Errorf("Add: %v", err)
		}
		return outbox.Add(tx, outbox.Message{Type: "t", GroupKey: "g"})
	})
}

func TestNoDefaultOutbox(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	setUp(t, db, outbox.Config{Outboxes: named("a", "b"), DefaultOutbox: outbox.NoDefault})
	inTx(t, db, func(tx *gorm.DB) error {
		err := outbox.Add(tx, message("t"))
		if !errors.Is(err, outbox.ErrInvalidMessage) || !strings.Contains(err.Error(), `Outbox is empty and there is no default; it must be one of "a", "b"`) {
			t.Errorf("Add: %v", err)
		}
		return outbox.Add(tx, outbox.Message{Outbox: "b", Type: "t"})
	})
}
