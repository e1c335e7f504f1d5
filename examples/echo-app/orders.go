package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"gorm.io/gorm"

	"github.com/gormoutbox/outbox"
	"github.com/gormoutbox/outbox/gormoutbox"
)

// Order is the business data of the service.
type Order struct {
	ID          int64      `json:"id" gorm:"primaryKey"`
	Customer    string     `json:"customer"`
	Item        string     `json:"item"`
	Quantity    int        `json:"quantity"`
	PlacedAt    time.Time  `json:"placed_at"`
	CancelledAt *time.Time `json:"cancelled_at,omitempty"`
}

// The types of the messages.
const (
	placed    = "order.placed"
	cancelled = "order.cancelled"
)

// OrderPlaced is the event that others learn of a new order by.
type OrderPlaced struct {
	OrderID  int64  `json:"order_id"`
	Customer string `json:"customer"`
	Item     string `json:"item"`
	Quantity int    `json:"quantity"`
}

// OutboxMessage implements outbox.Event. Messages of one order are delivered in
// the order of their commits, because they are of one group.
func (e OrderPlaced) OutboxMessage() (outbox.Message, error) {
	return outbox.JSON(placed, e, outbox.Group(strconv.FormatInt(e.OrderID, 10)))
}

// OrderCancelled is the event that ends an order.
type OrderCancelled struct {
	OrderID int64 `json:"order_id"`
}

// OutboxMessage implements outbox.Event.
func (e OrderCancelled) OutboxMessage() (outbox.Message, error) {
	return outbox.JSON(cancelled, e, outbox.Group(strconv.FormatInt(e.OrderID, 10)))
}

// Orders keeps orders, and announces what happens to them.
type Orders struct {
	db      *gorm.DB
	journal *Journal // is told when a message was committed
}

// Place stores an order and its event, or neither. When it returns nil both are
// committed; that is the time to answer the client, and no sooner.
func (o Orders) Place(ctx context.Context, order *Order) error {
	err := o.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		if err := tx.Create(order).Error; err != nil {
			return err
		}
		if err := o.noteCommit(tx, order.ID, placed); err != nil {
			return err
		}
		// Last, because it may hold the lock of a group until the commit.
		return outbox.Add(tx, OrderPlaced{order.ID, order.Customer, order.Item, order.Quantity})
	})
	if err != nil {
		return fmt.Errorf("place the order: %w", err)
	}
	return nil
}

// Cancel ends an order. One that does not exist, or has been cancelled, is
// gorm.ErrRecordNotFound.
func (o Orders) Cancel(ctx context.Context, id int64) error {
	err := o.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		open := tx.Model(&Order{}).Where("id = ? AND cancelled_at IS NULL", id)
		update := open.Update("cancelled_at", time.Now().UTC())
		switch {
		case update.Error != nil:
			return update.Error
		case update.RowsAffected == 0:
			return gorm.ErrRecordNotFound
		}
		if err := o.noteCommit(tx, id, cancelled); err != nil {
			return err
		}
		return outbox.Add(tx, OrderCancelled{id})
	})
	if err != nil {
		return fmt.Errorf("cancel order %d: %w", id, err)
	}
	return nil
}

// noteCommit is for the page, which shows how long deliveries take: it has the
// journal told of the commit, before anybody can deliver the message.
func (o Orders) noteCommit(tx *gorm.DB, id int64, typ string) error {
	own, err := gormoutbox.From(tx)
	if err != nil {
		return err
	}
	own.OnCommit(func() { o.journal.Committed(id, typ) })
	return nil
}

// Find gives an order, or gorm.ErrRecordNotFound.
func (o Orders) Find(ctx context.Context, id int64) (Order, error) {
	var order Order
	if err := o.db.WithContext(ctx).First(&order, id).Error; err != nil {
		return Order{}, fmt.Errorf("find order %d: %w", id, err)
	}
	return order, nil
}

// Bounds of what an order may say.
const (
	maxText     = 100 // characters
	maxQuantity = 1000
)

// inputError is a mistake in what a client has sent.
type inputError string

func (e inputError) Error() string { return string(e) }

// parseOrder reads an order as a client sends it. What is wrong with it is an
// inputError; other errors are those of body.
func parseOrder(body io.Reader) (Order, error) {
	var in struct {
		Customer string `json:"customer"`
		Item     string `json:"item"`
		Quantity int    `json:"quantity"`
	}
	dec := json.NewDecoder(body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&in); err != nil {
		return Order{}, decodeError(err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Order{}, inputError("there is something after the JSON object")
	}
	order := Order{
		Customer: strings.TrimSpace(in.Customer),
		Item:     strings.TrimSpace(in.Item),
		Quantity: in.Quantity,
		PlacedAt: time.Now().UTC(),
	}
	return order, check(order)
}

func check(o Order) error {
	var wrong []string
	for _, text := range []struct{ field, value string }{{"customer", o.Customer}, {"item", o.Item}} {
		n := utf8.RuneCountInString(text.value)
		switch {
		case n == 0:
			wrong = append(wrong, text.field+" is missing")
		case n > maxText:
			wrong = append(wrong, fmt.Sprintf("%s has %d characters; it must have at most %d", text.field, n, maxText))
		case strings.ContainsFunc(text.value, unicode.IsControl):
			wrong = append(wrong, text.field+" has a control character; it must have none")
		}
	}
	if o.Quantity < 1 || o.Quantity > maxQuantity {
		wrong = append(wrong, fmt.Sprintf("quantity is %d; it must be from 1 to %d", o.Quantity, maxQuantity))
	}
	if len(wrong) > 0 {
		return inputError(strings.Join(wrong, "; "))
	}
	return nil
}

// decodeError says in the client's words what the decoder has found.
func decodeError(err error) error {
	var wrongType *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &wrongType) && wrongType.Field != "":
		want := "a whole number"
		if wrongType.Type.Kind() == reflect.String {
			want = "a string"
		}
		return inputError(fmt.Sprintf("%s is a JSON %s; it must be %s", wrongType.Field, wrongType.Value, want))
	case errors.As(err, &wrongType):
		return inputError(fmt.Sprintf("the body is a JSON %s; it must be an object", wrongType.Value))
	case errors.Is(err, io.EOF):
		return inputError("the body is empty; it must be a JSON object")
	case errors.As(err, &syntax), errors.Is(err, io.ErrUnexpectedEOF):
		return inputError("the body is not JSON: " + err.Error())
	}
	if field, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return inputError("there is no field " + field)
	}
	return fmt.Errorf("read the body: %w", err)
}

// parseID reads the id of an order.
func parseID(text string) (int64, error) {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil || id < 1 {
		return 0, inputError(fmt.Sprintf("%q is not the id of an order; it must be a positive number", text))
	}
	return id, nil
}
