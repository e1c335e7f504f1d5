package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/internal/testdb"
)

// relayed is a configuration with one outbox and a recorder.
func relayed(change func(*outbox.Outbox)) (outbox.Config, *recorder) {
	r := newRecorder()
	c := one(change)
	c.Outboxes[0].Relay = r
	return c, r
}

func TestAddThenDrain(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(nil)
		in := setUp(t, db, c)
		want := outbox.Message{
			Type: "order.placed", GroupKey: "o-1", Payload: []byte("\x00\xff{"), Headers: map[string]string{"": "x", "K": "1", "k": "ü"},
		}
		var stored []outbox.Envelope
		inTx(t, db, func(tx *gorm.DB) (err error) {
			stored, err = outbox.AddReturning(tx, want, message("second"))
			return err
		})
		if n := drain(t, in); n != 2 {
			t.Fatalf("%d messages delivered, want 2", n)
		}
		got := r.all()
		slices.SortFunc(got, func(a, b outbox.Envelope) int { return int(a.ID - b.ID) })
		for i := range stored {
			if g, w := fmt.Sprintf("%+v", normal(got[i])), fmt.Sprintf("%+v", normal(stored[i])); g != w {
				t.Errorf("delivered %s\n   stored %s", g, w)
			}
		}
		e := got[0]
		if e.Type != want.Type || e.GroupKey != want.GroupKey || string(e.Payload) != string(want.Payload) || e.Outbox != "orders" ||
			e.Attempts != 0 || e.InsertedAt.IsZero() || e.Installation == "" || e.ID == 0 {
			t.Errorf("delivered %+v", e)
		}
		if fmt.Sprint(e.Headers) != fmt.Sprint(want.Headers) {
			t.Errorf("Headers = %v, want %v", e.Headers, want.Headers)
		}
	})
}

// normal makes envelopes comparable that differ in form only.
func normal(e outbox.Envelope) outbox.Envelope {
	e.InsertedAt, e.ScheduledAt = e.InsertedAt.UTC(), e.ScheduledAt.UTC()
	if len(e.Headers) == 0 {
		e.Headers = nil
	}
	e.Payload = append([]byte{}, e.Payload...)
	return e
}

func TestOrderWithinTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(func(o *outbox.Outbox) { o.Partitions = 4 })
		in := setUp(t, db, c)
		var want []string
		inTx(t, db, func(tx *gorm.DB) error {
			for i := range 20 {
				a, b := fmt.Sprintf("%02d-a", i), fmt.Sprintf("%02d-b", i)
				want = append(want, a, b)
				if err := outbox.Add(tx, outbox.Message{Type: a, GroupKey: "g"}, outbox.Message{Type: b, GroupKey: "g"}); err != nil {
					return err
				}
			}
			return nil
		})
		drain(t, in)
		if got := r.types(); !slices.Equal(got, want) {
			t.Errorf("delivered %v", got)
		}
	})
}

func TestAddNothing(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	in := install(t, db, one(nil)) // without tables: SQL would fail
	inTx(t, db, func(tx *gorm.DB) error {
		stored, err := outbox.AddReturning(tx)
		return errors.Join(err, outbox.Add(tx), in.Add(tx, outbox.Events([]outbox.Message(nil))...), none(stored))
	})
}

func none(stored []outbox.Envelope) error {
	if len(stored) > 0 {
		return fmt.Errorf("stored %v", stored)
	}
	return nil
}

// C02
func TestAddOutsideTransaction(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(nil)
		in := setUp(t, db, c)
		refused := func(how string, handle *gorm.DB) {
			t.Helper()
			if err := outbox.Add(handle, message(how)); !errors.Is(err, outbox.ErrNotInTransaction) {
				t.Errorf("%s: Add: %v, want ErrNotInTransaction", how, err)
			}
		}
		refused("bare handle", db)
		refused("nil", nil)
		errRollback := errors.New("roll back")
		err := db.Transaction(func(*gorm.DB) error {
			refused("outer handle in the closure", db)
			return errRollback
		})
		if !errors.Is(err, errRollback) {
			t.Errorf("Transaction: %v", err)
		}
		tx := db.Begin()
		refused("outer handle beside Begin", db)
		if err := tx.Rollback().Error; err != nil {
			t.Errorf("Rollback: %v", err)
		}
		if err := db.Connection(func(conn *gorm.DB) error {
			refused("Connection", conn)
			return nil
		}); err != nil {
			t.Errorf("Connection: %v", err)
		}
		inTx(t, db, func(tx *gorm.DB) error {
			if err := outbox.Add(tx.Session(&gorm.Session{DryRun: true}), message("dry")); err == nil {
				t.Error("Add in a dry run returned nil")
			}
			return nil
		})
		if n := drain(t, in); n != 0 {
			t.Errorf("%d messages were stored: %v", n, r.types())
		}
	})
}

func TestAddWithoutPlugin(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	in, err := outbox.New(one(nil))
	if err != nil {
		t.Fatal(err)
	}
	inTx(t, db, func(tx *gorm.DB) error {
		if err := outbox.Add(tx, message("t")); !errors.Is(err, outbox.ErrNotInstalled) {
			t.Errorf("Add: %v, want ErrNotInstalled", err)
		}
		if err := in.Add(tx, message("t")); !errors.Is(err, outbox.ErrNotInstalled) {
			t.Errorf("Instance.Add: %v, want ErrNotInstalled", err)
		}
		return nil
	})
}

func TestSeveralInstances(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		first, r1 := relayed(nil)
		second, r2 := relayed(nil)
		second.Name, second.Table = "billing", "billing_messages"
		in1, in2 := install(t, db, first), install(t, db, second)
		if err := outbox.AutoMigrate(db); err != nil {
			t.Fatal(err)
		}
		inTx(t, db, func(tx *gorm.DB) error {
			if err := outbox.Add(tx, message("t")); !errors.Is(err, outbox.ErrAmbiguousInstance) {
				t.Errorf("Add: %v, want ErrAmbiguousInstance", err)
			}
			_, err := in2.AddReturning(tx, message("two"))
			return errors.Join(in1.Add(tx, message("one")), err)
		})
		drain(t, in1)
		drain(t, in2)
		if a, b := r1.types(), r2.types(); !slices.Equal(a, []string{"one"}) || !slices.Equal(b, []string{"two"}) {
			t.Errorf("delivered %v and %v", a, b)
		}
	})
}

type tenant struct{}

func TestBeforeAdd(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	c, r := relayed(nil)
	errHook := errors.New("no tenant")
	c.BeforeAdd = func(ctx context.Context, m *outbox.Message) error {
		name, ok := ctx.Value(tenant{}).(string)
		if !ok {
			return errHook
		}
		m.Headers["tenant"] = name
		m.GroupKey = name
		return nil
	}
	in := setUp(t, db, c)
	shared := map[string]string{"k": "v"}
	ctx := context.WithValue(t.Context(), tenant{}, "acme")
	inTx(t, db.WithContext(ctx), func(tx *gorm.DB) error {
		return outbox.Add(tx, outbox.Message{Type: "a", Headers: shared}, message("b"))
	})
	inTx(t, db, func(tx *gorm.DB) error {
		if err := outbox.Add(tx, message("t")); !errors.Is(err, errHook) || errors.Is(err, outbox.ErrInvalidMessage) {
			t.Errorf("Add: %v, want the hook's error", err)
		}
		return nil
	})
	drain(t, in)
	if len(shared) != 1 {
		t.Errorf("the publisher's own headers became %v", shared)
	}
	for _, e := range r.all() {
		if e.Headers["tenant"] != "acme" || e.GroupKey != "acme" {
			t.Errorf("delivered %+v", e)
		}
	}
	if n := len(r.all()); n != 2 {
		t.Errorf("%d delivered, want 2", n)
	}
}

func TestBeforeAddIsValidated(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	c := one(nil)
	c.BeforeAdd = func(_ context.Context, m *outbox.Message) error {
		m.Outbox = "elsewhere"
		return nil
	}
	install(t, db, c)
	inTx(t, db, func(tx *gorm.DB) error {
		if err := outbox.Add(tx, message("t")); !errors.Is(err, outbox.ErrUnknownOutbox) {
			t.Errorf("Add: %v, want ErrUnknownOutbox", err)
		}
		return nil
	})
}

func TestPanicsOfPublishersPass(t *testing.T) {
	t.Parallel()
	db := testdb.SQLite(t).Gorm(t)
	c, _ := relayed(nil)
	c.BeforeAdd = func(context.Context, *outbox.Message) error { panic("hook") }
	in := setUp(t, db, c)
	func() {
		defer func() {
			if p := recover(); p != "hook" {
				t.Errorf("recovered %v, want the hook's panic", p)
			}
		}()
		_ = db.Transaction(func(tx *gorm.DB) error { return outbox.Add(tx, message("t")) })
	}()
	if n := drain(t, in); n != 0 {
		t.Errorf("%d messages were stored", n)
	}
}

// C05
func TestAddUnderEndedContext(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		createRows(t, db)
		c, r := relayed(nil)
		in := setUp(t, db, c)

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		failed := db.WithContext(ctx).Begin()
		if err := outbox.Add(failed, message("a")); err == nil {
			t.Error("Add on a failed Begin returned nil")
		}
		failed.Rollback()

		ctx, cancel = context.WithCancel(t.Context())
		err := db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			if err := tx.Create(&Row{Name: "b"}).Error; err != nil {
				t.Errorf("Create: %v", err)
			}
			cancel()
			if err := outbox.Add(tx, message("b")); !errors.Is(err, context.Canceled) {
				t.Errorf("Add after the cancel: %v", err)
			}
			return nil
		})
		if err == nil {
			t.Error("the transaction of a cancelled context committed")
		}

		ctx, cancel = context.WithCancel(t.Context())
		err = db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			err := errors.Join(tx.Create(&Row{Name: "c"}).Error, outbox.Add(tx, message("c")))
			cancel()
			return err
		})
		if err == nil {
			t.Error("the transaction that was cancelled before its commit committed")
		}
		if n := drain(t, in); n != 0 {
			t.Errorf("%d messages were stored: %v", n, r.types())
		}
		if n := countRows(t, db); n != 0 {
			t.Errorf("%d business rows were stored", n)
		}
		pool, err := db.DB()
		if err != nil {
			t.Fatal(err)
		}
		if n := pool.Stats().InUse; n != 0 {
			t.Errorf("%d connections are not back in the pool", n)
		}
	})
}

// C07
func TestIgnoredErrorOfAdd(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		createRows(t, db)
		c, r := relayed(nil)
		in := setUp(t, db, c)
		bad := outbox.Message{Type: "t", GroupKey: "\xff"}

		// A validation error leaves the transaction usable.
		inTx(t, db, func(tx *gorm.DB) error {
			_ = outbox.Add(tx, bad)
			return tx.Create(&Row{Name: "flat"}).Error
		})
		inTx(t, db, func(tx *gorm.DB) error {
			_ = tx.Transaction(func(nested *gorm.DB) error {
				if err := outbox.Add(nested, message("undone")); err != nil {
					t.Errorf("Add: %v", err)
				}
				return outbox.Add(nested, bad)
			})
			return tx.Create(&Row{Name: "nested"}).Error
		})
		if n := countRows(t, db); n != 2 {
			t.Errorf("%d business rows, want 2", n)
		}
		if n := drain(t, in); n != 0 {
			t.Errorf("%d messages were stored: %v", n, r.types())
		}
	})
}

// C07: an error of the database itself, as PostgreSQL treats it.
func TestIgnoredDatabaseErrorRollsBack(t *testing.T) {
	t.Parallel()
	db := testdb.Postgres(t).Gorm(t)
	createRows(t, db)
	install(t, db, one(nil)) // without tables
	err := db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(&Row{Name: "lost"}).Error; err != nil {
			t.Errorf("Create: %v", err)
		}
		if err := outbox.Add(tx, message("t")); err == nil || !strings.HasPrefix(err.Error(), "outbox: add: ") {
			t.Errorf("Add without tables: %v", err)
		}
		return nil
	})
	if err == nil {
		t.Error("the transaction returned nil although the server rolled it back")
	}
	if n := countRows(t, db); n != 0 {
		t.Errorf("%d business rows, want none", n)
	}
}

// hooked adds a message when it is created.
type hooked struct {
	ID   int64
	Name string
}

var errHooked = errors.New("hook failed")

func (h *hooked) AfterCreate(tx *gorm.DB) error {
	if err := outbox.Add(tx, message(h.Name)); err != nil {
		return err
	}
	if h.Name == "fails" {
		return errHooked
	}
	return nil
}

// C11
func TestAddInModelHook(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		if err := db.AutoMigrate(&hooked{}); err != nil {
			t.Fatal(err)
		}
		c, r := relayed(nil)
		in := setUp(t, db, c)
		if err := db.Create(&hooked{Name: "fits"}).Error; err != nil {
			t.Errorf("Create: %v", err)
		}
		if err := db.Create(&hooked{Name: "fails"}).Error; !errors.Is(err, errHooked) {
			t.Errorf("Create: %v, want the hook's error", err)
		}
		bare := db.Session(&gorm.Session{SkipDefaultTransaction: true})
		if err := bare.Create(&hooked{Name: "bare"}).Error; !errors.Is(err, outbox.ErrNotInTransaction) {
			t.Errorf("Create without a transaction: %v, want ErrNotInTransaction", err)
		}
		drain(t, in)
		if got := r.types(); !slices.Equal(got, []string{"fits"}) {
			t.Errorf("delivered %v, want fits alone", got)
		}
	})
}

// C24
func TestSizesAroundTheNotificationLimit(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]outbox.NotifyMode{"after commit": outbox.AfterCommit, "in transaction": outbox.InTransaction} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testdb.Postgres(t).Gorm(t)
			createRows(t, db)
			c, r := relayed(nil)
			c.Notify = mode
			in := setUp(t, db, c)
			sizes := []int{7990, 7999, 8000, 8001, 8010, 1 << 20}
			for _, n := range sizes {
				inTx(t, db, func(tx *gorm.DB) error {
					text := strings.Repeat("x", n)
					return errors.Join(tx.Create(&Row{}).Error, outbox.Add(tx, outbox.Message{
						Type: "t", GroupKey: text[:min(n, outbox.MaxGroupKeyBytes)], Payload: []byte(text), Headers: map[string]string{text: text},
					}))
				})
			}
			inTx(t, db, func(tx *gorm.DB) error {
				return outbox.Add(tx, outbox.Message{Type: "t", GroupKey: strings.Repeat("€", 3000)})
			})
			if n := drain(t, in); n != len(sizes)+1 {
				t.Errorf("%d messages delivered, want %d: %v", n, len(sizes)+1, r.types())
			}
		})
	}
}

// C35: what is not refused comes back as it was. What is refused is in
// badMessages.
func TestHeadersRoundTrip(t *testing.T) {
	t.Parallel()
	want := map[string]string{
		"": "empty key", "empty": "", `"`: `"`, `\`: `\`, "\u2028": "\u2028\u2029", "emoji": "👩‍👩‍👧", "\t\n": "\x01\x1f\x7f",
		strings.Repeat("k", 10_000): "long", "Case": "1", "case": "2", "int": "9007199254740993", "max": "9223372036854775807",
		"deep": strings.Repeat("[", 1000) + strings.Repeat("]", 1000), "escape": `\u0000 \ud800 &<>`, "replacement": "\uFFFD",
	}
	onEach(t, func(t *testing.T, open func(...testdb.Option) *gorm.DB) {
		db := open()
		c, r := relayed(nil)
		in := setUp(t, db, c)
		inTx(t, db, func(tx *gorm.DB) error { return outbox.Add(tx, outbox.Message{Type: "t", Headers: want}) })
		drain(t, in)
		got := r.wait(t, 1)[0].Headers
		for k, v := range want {
			if g, ok := got[k]; !ok || g != v {
				t.Errorf("Headers[%.20q] = %.40q (there: %v), want %.40q", k, g, ok, v)
			}
		}
		if len(got) != len(want) {
			t.Errorf("%d headers, want %d", len(got), len(want))
		}
	})
}
