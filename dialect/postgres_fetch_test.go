package dialect_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gormoutbox/outbox/dialect"
	"github.com/gormoutbox/outbox/engine"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// Where a delivery could not be recorded none is made. C31
func TestReadOnlyServerDeliversNothing(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	s := newPostgres(t, pg.SQL(t))
	db := pg.SQL(t)
	tx := begin(t, db)
	addIn(t, s, tx, groupRow("a"))
	commit(t, tx)
	readOnly, err := dialect.NewPostgres(pg.SQL(t, testdb.Param("default_transaction_read_only", "on")), dialect.Config{Outboxes: outboxes})
	if err != nil {
		t.Fatal(err)
	}
	err = readOnly.WithPartition(t.Context(), onlyLane, func(ctx context.Context, c engine.Claim) error {
		page, err := c.Fetch(ctx, anyQuery())
		if err == nil {
			t.Errorf("fetched %d messages from a read-only server", len(page.Envelopes))
		}
		return err
	})
	if err == nil {
		t.Error("a claim on a read-only server succeeded")
	}
	if got := deliverAll(t, s, onlyLane); len(got) != 1 {
		t.Errorf("delivered %v afterwards, want the one message", got)
	}
}

// Where payloads are large the server must not send what a page cannot take:
// after the first page it ends the lists itself, and nothing is missed.
func TestLargePayloadsAreBoundedByTheServer(t *testing.T) {
	t.Parallel()
	pg := testdb.Postgres(t)
	db := pg.SQL(t)
	s := newPostgres(t, db)
	tx := begin(t, db)
	rows := make([]engine.Row, 30)
	for i := range rows {
		rows[i] = groupRow(fmt.Sprint(i % 3))
		rows[i].Payload = make([]byte, 1000)
	}
	rows[20].Payload = make([]byte, 5000) // more than a page by itself
	want := addIn(t, s, tx, rows...)
	commit(t, tx)
	var got []int64
	for range len(rows) {
		err := s.WithPartition(t.Context(), onlyLane, func(ctx context.Context, c engine.Claim) error {
			page, err := c.Fetch(ctx, engine.Query{Limit: 100, MaxBytes: 3000, Lease: time.Second})
			if err != nil {
				return err
			}
			if n := len(page.Envelopes); n > 3 || page.More != (len(got)+n < len(want)) {
				t.Errorf("page of %d messages after %d, more %v", n, len(got), page.More)
			}
			var ids []int64
			for _, e := range page.Envelopes {
				ids = append(ids, e.ID)
			}
			got = append(got, ids...)
			c.Settle(engine.Settlement{Delivered: ids})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("delivered %v, want %v", got, want)
	}
}
