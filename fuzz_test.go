package outbox_test

import (
	"bytes"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// fuzzed adds messages and gives what is delivered of them.
type fuzzed struct {
	db       *gorm.DB
	instance *outbox.Instance
	recorder *recorder
}

func newFuzzed(f *testing.F) *fuzzed {
	db := testdb.SQLite(f).Gorm(f)
	c, r := relayed(nil)
	return &fuzzed{db, setUp(f, db, c), r}
}

// roundTrip returns what became of a message: the one that was delivered, or
// nil if Add has refused it, after which the transaction went on. Whatever is
// delivered is what was stored.
func (f *fuzzed) roundTrip(t *testing.T, m outbox.Message) *outbox.Envelope {
	t.Helper()
	before := len(f.recorder.all())
	var stored []outbox.Envelope
	refused := false
	inTx(t, f.db, func(tx *gorm.DB) (err error) {
		stored, err = outbox.AddReturning(tx, m)
		refused = err != nil
		return nil
	})
	n := drain(t, f.instance)
	switch {
	case refused && n == 0:
		return nil
	case refused || n != 1:
		t.Fatalf("refused: %v, and %d messages delivered", refused, n)
	}
	got := f.recorder.all()[before]
	if got.ID != stored[0].ID || got.Type != m.Type || got.GroupKey != m.GroupKey || !bytes.Equal(got.Payload, m.Payload) ||
		!maps.Equal(got.Headers, m.Headers) {
		t.Fatalf("added %+v, delivered %+v", m, got)
	}
	return &got
}

// isText is what a text field must be.
func isText(s string, limit int) bool {
	return len(s) <= limit && utf8.ValidString(s) && !strings.Contains(s, "\x00")
}

func FuzzType(f *testing.F) {
	db := newFuzzed(f)
	for _, s := range []string{"order.placed", "", " ", "a\x00", "\xff", "\xed\xa0\x80", "ü", `'"\`, strings.Repeat("t", 255), strings.Repeat("t", 256)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, typ string) {
		delivered := db.roundTrip(t, outbox.Message{Type: typ}) != nil
		if want := typ != "" && isText(typ, outbox.MaxTypeBytes); delivered != want {
			t.Errorf("Type %q delivered: %v, want %v", typ, delivered, want)
		}
	})
}

func FuzzGroupKey(f *testing.F) {
	db := newFuzzed(f)
	for _, s := range []string{"", "g", "\x00", "\xc3(", "€", "{}", `a'b"c`, strings.Repeat("g", 16<<10), strings.Repeat("g", 16<<10+1)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, key string) {
		delivered := db.roundTrip(t, outbox.Message{Type: "t", GroupKey: key}) != nil
		if want := isText(key, outbox.MaxGroupKeyBytes); delivered != want {
			t.Errorf("GroupKey %q delivered: %v, want %v", key, delivered, want)
		}
	})
}

func FuzzPayload(f *testing.F) {
	db := newFuzzed(f)
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for _, b := range [][]byte{nil, {}, {0}, all, []byte(`\x00`), []byte("{\"a\":1}"), []byte("'"), bytes.Repeat([]byte{0xff}, 1<<16)} {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		if db.roundTrip(t, outbox.Message{Type: "t", Payload: payload}) == nil {
			t.Errorf("payload of %d bytes was refused", len(payload))
		}
	})
}

func FuzzHeaders(f *testing.F) {
	db := newFuzzed(f)
	for _, s := range [][2]string{
		{"", ""},
		{"k", "v"},
		{`"`, `\`},
		{"k", "\x00"},
		{"\x00", "v"},
		{"k", "\xff"},
		{"\xed\xa0\x80", "v"},
		{"\u2028", "\u2029"},
		{"k", `\u0000`},
		{"k", "\x01\x1f<>&"},
		{"k", "\uFFFD"},
		{strings.Repeat("k", 10_000), "👩‍👩‍👧"},
	} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, key, value string) {
		delivered := db.roundTrip(t, headers(key, value)) != nil
		if want := isText(key, outbox.MaxHeadersBytes) && isText(value, outbox.MaxHeadersBytes-len(key)); delivered != want {
			t.Errorf("Headers[%q] = %q delivered: %v, want %v", key, value, delivered, want)
		}
	})
}
