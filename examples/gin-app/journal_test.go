package main

import (
	"fmt"
	"testing"

	"github.com/gormoutbox/outbox"
)

func envelope(orderID int) outbox.Envelope {
	return outbox.Envelope{
		ID: int64(orderID), Installation: "i", Outbox: "o", Type: placed,
		Payload: fmt.Appendf(nil, `{"order_id":%d}`, orderID),
	}
}

// A message may come again; the subscriber has it once.
func TestJournalDropsDuplicates(t *testing.T) {
	t.Parallel()
	j := NewJournal()
	var first Entry
	for range 2 {
		if err := j.Deliver(t.Context(), envelope(1)); err != nil {
			t.Fatal(err)
		}
		entries, _, _ := j.Since(0)
		if len(entries) != 1 {
			t.Fatalf("the journal has %+v", entries)
		}
		if first.DedupID == "" {
			first = entries[0]
		}
		if !entries[0].DeliveredAt.Equal(first.DeliveredAt) {
			t.Error("the second delivery has replaced the first")
		}
	}
}

func TestJournalJoinsCommitAndDelivery(t *testing.T) {
	t.Parallel()
	j := NewJournal()
	j.Committed(1, placed)
	for _, id := range []int{1, 2} {
		if err := j.Deliver(t.Context(), envelope(id)); err != nil {
			t.Fatal(err)
		}
	}
	entries, _, _ := j.Since(0)
	if len(entries) != 2 || entries[0].LatencyMS == nil || *entries[0].LatencyMS < 0 || entries[1].LatencyMS != nil {
		t.Errorf("the journal has %+v", entries)
	}
}

func TestJournalTellsWhatIsNew(t *testing.T) {
	t.Parallel()
	j := NewJournal()
	_, last, changed := j.Since(0)
	for id := range int64(maxEntries + 1) {
		j.Committed(id, placed)
	}
	<-changed
	if entries, _, _ := j.Since(last); len(entries) != maxEntries || entries[0].OrderID != 1 {
		t.Errorf("%d entries, the first of order %d", len(entries), entries[0].OrderID)
	}
	_, last, changed = j.Since(0)
	select {
	case <-changed:
		t.Error("something has changed")
	default:
	}
	j.Committed(1, placed)
	<-changed
	if entries, _, _ := j.Since(last); len(entries) != 1 || entries[0].OrderID != 1 {
		t.Errorf("new are %+v", entries)
	}
}

func TestJournalRefusesForGood(t *testing.T) {
	t.Parallel()
	if err := NewJournal().Deliver(t.Context(), outbox.Envelope{Payload: []byte("x")}); err == nil {
		t.Error("took what is not JSON")
	}
}
